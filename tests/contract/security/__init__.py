"""Who may call what, with which certificate or token, and what TLS failures say."""
