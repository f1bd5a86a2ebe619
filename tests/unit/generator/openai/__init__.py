"""Sessions of agents without a server."""
