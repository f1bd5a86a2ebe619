"""The transformers engine: plain Hugging Face decoding where vLLM does not install.

All decoding with the library transformers is here.
"""
