"""Measures forecasts of output lengths: quality and speed, on data whose best possible forecast is known."""
