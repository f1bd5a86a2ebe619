"""Serves in this process: `penstock serve`, and the `penstock reward` commands.

Only this package starts a service's server in the console's own process; runs start theirs by `console.launch`.
"""
