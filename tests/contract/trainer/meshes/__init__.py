"""Trainers with a real tiny model against scripted and real brokers: steps, failures, restarts."""
