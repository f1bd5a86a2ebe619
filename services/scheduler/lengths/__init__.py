"""Forecasts of completion lengths: what was seen, the models fitted to it, and how good their forecasts turned out."""
