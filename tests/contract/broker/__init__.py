"""The broker over real gRPC, on every store; one file a subject.

Plain calls are in `service`, finished trajectories in `trajectories`.
"""
