"""End to end: all services as processes, real training; `runs.py` starts them."""
