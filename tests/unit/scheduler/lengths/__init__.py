"""Forecasts of output lengths."""
