"""Finished trajectories over real gRPC: put, received, acknowledged and exported."""
