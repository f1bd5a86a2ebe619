"""A real Prometheus and a real Alertmanager beside services whose faults a test makes."""
