"""What the broker asks of a store, and the clock of a run.

The protocol that every store implements. No implementation (see `storage`) and no rule lives here.
"""
