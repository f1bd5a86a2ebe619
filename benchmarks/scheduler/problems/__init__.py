"""Makes the planning problems that the scheduler's benchmarks share: GPUs, models, workloads and clusters.

Nothing is solved or measured here.
"""
