"""Runs the services' own pure cores on a virtual clock, without sockets, stores or engines, for `penstock simulate`.

Studies of a single mechanism, such as dispatch policies over one queue, are in `benchmarks`.
"""
