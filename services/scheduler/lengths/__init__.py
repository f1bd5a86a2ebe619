"""Forecasts of completion lengths: what was seen, the models fitted to it, and how good their forecasts are.

Knows nothing of plans. torch is imported only in the child process `transformer_worker`.
"""
