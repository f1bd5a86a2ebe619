"""Tiny models, adapters and tokenizers, made on the spot: real files, nothing downloaded."""
