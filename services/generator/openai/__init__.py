"""The OpenAI-compatible endpoint: agents written against any OpenAI client make trajectories of the policy.

The root holds HTTP and the endpoint behind it. Imports run one way: formats <- sessions <- root.
"""
