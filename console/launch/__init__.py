"""Starting, supervising and stopping service processes on this machine.

What a process needs to live here: ports, cores, logs, restarts, disk space, a Redis of its own. Nothing about a run's
progress or how it is shown.
"""
