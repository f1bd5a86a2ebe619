"""One process and its machine: signals, grace periods, children, logs, full disks.

No gRPC and no knowledge of runs.
"""
