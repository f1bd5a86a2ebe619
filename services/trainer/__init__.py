"""The trainer: pulls microbatches, steps, acknowledges, publishes the next policy version.

The root holds the processes, their settings and the gRPC service; `run` is the life of one run, the other folders its
parts. Modules below `run` know neither the service nor the server.
"""
