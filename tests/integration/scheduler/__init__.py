"""Models that the scheduler runs in child processes."""
