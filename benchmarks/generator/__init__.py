"""What in-flight updates cost a real engine, and what its concurrency should be."""
