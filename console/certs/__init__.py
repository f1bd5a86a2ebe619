"""Issues a cluster's certificates: an authority in a folder, and short-lived certificates that name roles."""
