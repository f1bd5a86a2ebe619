"""`penstock bench` as a process: what it reports, and that it leaves nothing behind."""
