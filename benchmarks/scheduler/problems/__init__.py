"""Planning problems that the scheduler's benchmarks share: GPUs, models, workloads and clusters.

Makes problems; solves and measures nothing.
"""
