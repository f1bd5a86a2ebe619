"""Notices that a machine will be taken away: a file, a URL, or a cloud's metadata server.

A notice becomes SIGTERM; what a process does on that is its own affair.
"""
