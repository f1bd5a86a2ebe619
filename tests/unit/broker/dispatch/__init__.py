"""Dispatch policies, their forecasts and their look-ahead."""
