"""Real trainers on a real Redis, and the trackers that they report to."""
