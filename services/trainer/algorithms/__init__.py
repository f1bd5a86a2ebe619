"""Defines the training objectives: one file per algorithm, pure functions of tensors.

`base` defines the interface, `loss` combines the parts, `registry` maps names to algorithms, and `terms` holds the
arithmetic they share. No network, no files and no model.
"""
