"""Implements the transformers engine: plain Hugging Face decoding where vLLM cannot be installed.

All decoding with the transformers library is here.
"""
