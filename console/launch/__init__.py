"""Starts, supervises and stops service processes on this machine.

Manages what a process needs: ports, cores, logs, restarts, disk space, a Redis. Knows nothing of a run's progress or
its display.
"""
