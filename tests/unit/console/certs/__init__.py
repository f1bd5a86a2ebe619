"""Certificates and keys that the console makes, and the authority behind them."""
