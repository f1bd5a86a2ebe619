"""A run's data: rows from files, the order of prompts, and the tokenizer.

No model and no network.
"""
