"""Two or more real services together: what one sends is what the other makes of it."""
