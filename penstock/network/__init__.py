"""Servers and channels: gRPC, health, failover, outages, HTTP listeners and metrics over HTTP.

How processes speak, not what they say: calls of a service are in `penstock.clients`.
"""
