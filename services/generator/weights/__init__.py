"""Published weights on their way into the engine: watch, fetch, install, attest, report.

How contents travel is in `penstock.transfer` and `penstock.downloads`.
"""
