"""What benchmarks compute and report, without measuring anything."""
