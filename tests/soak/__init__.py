"""The soak: the quick start's task on a fleet of real services for hours, under faults of every kind; `make soak`."""
