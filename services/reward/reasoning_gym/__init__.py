"""The reward `reasoning_gym`: scores by the package's own scorers (`reward`), confined in sandboxes (`cell`).

The package itself is imported in the sandbox only.
"""
