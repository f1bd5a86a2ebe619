"""Runs the services' own pure cores on a virtual clock, without sockets, stores or engines.

The root simulates dispatch of a queue; `virtual_run` simulates whole runs of a plan.
"""
