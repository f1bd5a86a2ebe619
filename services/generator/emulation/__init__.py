"""Pretend GPUs: how long steps take, how much fits, how long completions are. Pure; the emulated engine runs it."""
