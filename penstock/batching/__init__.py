"""Continuous batching in simulated time: the one model of it for emulated engines, the look-ahead and the simulators.

Here: the batch (`batched_engine`) and how long its steps take (`step_times`). Pure: nothing here reads a clock.
Not here: closed forms that estimate without playing a batch; those are in the broker's `dispatch.latency` and in the
scheduler's cost model, and are tested against this one.
"""
