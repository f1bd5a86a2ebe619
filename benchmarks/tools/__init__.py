"""Measures whether slow tools hold decoding back."""
