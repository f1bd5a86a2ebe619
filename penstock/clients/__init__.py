"""Typed asynchronous clients of the services: deadlines, back-off and reconnects are theirs."""
