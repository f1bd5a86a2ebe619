"""What the live view and the report show."""
