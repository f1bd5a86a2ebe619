"""A run around its steps: prompts, policy, stalls, background work."""
