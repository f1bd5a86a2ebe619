"""Data rows and the order of prompts."""
