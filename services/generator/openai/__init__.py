"""Serves the OpenAI-compatible endpoint, by which agents of any OpenAI client produce the policy's trajectories.

The root contains the HTTP layer and the endpoint behind it. Imports run one way: formats <- sessions <- root.
"""
