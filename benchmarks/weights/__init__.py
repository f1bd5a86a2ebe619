"""Measures the transfer of weights; deltas are in `delta`."""
