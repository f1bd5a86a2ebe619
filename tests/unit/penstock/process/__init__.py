"""A process and its surroundings: configuration, logs, signals, disks, children."""
