"""Fits the calibrated cost model's constants to published measurements.

`benchmarks.scheduler.calibration` prints the model's value for each row.
"""
