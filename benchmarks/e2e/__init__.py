"""Compares Penstock, TRL and the ideal overlap on one machine, with the same model, data, batch and reward."""
