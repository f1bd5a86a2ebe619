"""Weights on their way: manifests over gRPC, contents over HTTP and gloo, deltas and relays."""
