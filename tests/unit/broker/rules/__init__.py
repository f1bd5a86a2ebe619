"""Rules of admission and staleness, and the run's core rules."""
