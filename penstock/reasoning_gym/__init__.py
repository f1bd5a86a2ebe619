"""Tasks of the package reasoning_gym as rows and as a scorer: what trainers and reward workers share.

The package itself is imported by `worker` alone, which is a process of its own.
"""
