"""How an error ends a run: which errors are expected, which a retry would only repeat, which spoil the weights."""

from __future__ import annotations

from penstock.config import ConfigError
from penstock.errors import PenstockError
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.compute.compute_thread import InterruptedComputeError
from services.trainer.model.backend import BackendError
from services.trainer.step.step import EmptyStepError

_FINAL_REASONS = frozenset(
    ("INVALID_FIELD", "RUN_CONFLICT", "RUN_CLOSED", "NOT_OFFERED", "BAD_TOKEN", "FENCED", "OTHER_INSTANCE")
)
"""Reasons of errors that end a run for good: a retry would fail in the same way, or fight the run's new trainer."""

EXPECTED_ERRORS = (
    ConfigError,
    PenstockError,
    BackendError,
    EmptyStepError,
    CheckpointFormatError,
    OSError,
)
"""Their messages say what to do; any other is reported as internal, with its traceback in the log."""


def is_final(error: Exception) -> bool:
    """Whether the run would fail again in the same way."""
    if isinstance(error, PenstockError):
        return error.reason in _FINAL_REASONS
    return isinstance(error, (ConfigError, CheckpointFormatError))


def is_broken(error: Exception) -> bool:
    """Whether the backend itself failed: its weights may then be those between two optimiser steps of a batch."""
    return isinstance(error, BackendError) and not isinstance(error, InterruptedComputeError)
