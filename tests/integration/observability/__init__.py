"""What Prometheus is given: rules, and the names they use."""
