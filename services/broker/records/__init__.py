"""The broker's store interface, and the clock of a run.

The protocol that every store implements. No implementation (see `storage`) and no rule lives here.
"""
