"""Servers and channels: gRPC, health, failover, outages, HTTP listeners and metrics over HTTP.

The transport, not what travels over it: calls of a service are in `penstock.clients`.
"""
