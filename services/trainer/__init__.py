"""Trains in steps over scored groups, each of which produces a policy version.

Calls go down four layers: `run.training_run` (a run's life), `run.loop` (its steps, exactly once each), `step.step`
(one step), and a `model.backend.Backend` (passes and optimiser). The gRPC service above starts and stops runs.
"""
