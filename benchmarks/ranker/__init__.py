"""Forecasts of output lengths: how good and how quick, on data whose best possible forecast is known."""
