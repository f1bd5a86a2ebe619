"""What a deployment writes."""
