"""What all services share, by subject."""
