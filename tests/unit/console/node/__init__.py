"""What a machine of a plan runs and measures."""
