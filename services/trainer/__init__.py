"""The trainer: pulls microbatches, steps, acknowledges, publishes the next policy version."""
