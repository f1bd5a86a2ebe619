"""Forecasts completion lengths: keeps observed lengths, fits models to them and measures how good the forecasts are.

Independent of plans. torch is imported only in the child process `transformer_worker`.
"""
