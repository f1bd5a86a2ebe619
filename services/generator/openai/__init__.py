"""The OpenAI-compatible endpoint: agents written against any OpenAI client make trajectories of the policy."""
