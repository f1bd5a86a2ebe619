"""What others move trajectories with, in environments of their own, measured beside the broker."""
