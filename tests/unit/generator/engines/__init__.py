"""What engines share, and parts of vLLM's that need no engine."""
