"""Published measurements, and the fit of the calibrated cost model's constants to them.

What the model says of each row is printed by `benchmarks.scheduler.calibration`.
"""
