"""Every algorithm against its printed formula, written naively in `naive.py`."""
