"""The reward service: leases finished samples, asks a reward model, returns score and status."""
