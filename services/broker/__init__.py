"""The broker: owns every run's trajectory state in Redis and hands it on, each piece exactly once."""
