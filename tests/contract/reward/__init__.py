"""Reward workers and reward servers over real gRPC."""
