"""What a broker knows of its generators, and what dispatch makes of it."""
