"""Real processes and a real Redis: restarts, faults and the command line, by subject."""
