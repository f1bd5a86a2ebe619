"""Terms that algorithms share: ratios, KL estimates, advantages over time, corrections and penalties.

Pure functions of tensors that know no algorithm.
"""
