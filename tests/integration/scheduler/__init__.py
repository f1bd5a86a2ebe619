"""Models that the scheduler runs in child processes, and machines that follow its plans."""
