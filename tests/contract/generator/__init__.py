"""Whole generators against a scripted broker and weight store, and the clients that they use."""
