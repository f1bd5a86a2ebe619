"""Runs the services' own pure cores on a virtual clock, without sockets, stores or engines."""
