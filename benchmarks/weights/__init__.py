"""What travelling weights cost: deltas in `delta`."""
