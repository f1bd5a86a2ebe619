"""What is optimised: one file per algorithm, pure functions of tensors.

`base` says what an algorithm is, `loss` puts the parts together, `registry` knows them by name, and `terms` holds the
arithmetic they share. No network, no files and no model.
"""
