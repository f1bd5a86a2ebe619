"""End to end: Penstock, TRL and the ideal overlap on one machine, over the same model, data, batch and reward."""
