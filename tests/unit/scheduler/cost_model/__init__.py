"""What a plan costs and earns."""
