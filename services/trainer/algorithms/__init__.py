"""What is optimised: one file an algorithm, pure functions of tensors.

`base.py` says what an algorithm is; `loss.py` puts the parts together; `registry.py` knows them by name.
"""
