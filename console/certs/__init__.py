"""Certificates of a cluster: an authority in a folder, and short-lived certificates that name their holder's roles."""
