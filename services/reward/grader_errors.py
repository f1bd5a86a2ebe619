"""Tells when a grader is broken: its share of errors among the last samples, whatever they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.v1 import types_pb2

WINDOW, LEAST = 64, 16
"""Samples looked back on, and how many say anything."""
_ERRORS = frozenset({types_pb2.SCORE_STATUS_SANDBOX_ERROR, types_pb2.SCORE_STATUS_JUDGE_ERROR})


def is_grader_error(score: types_pb2.Score) -> bool:
    """Whether the grader failed, which says nothing about the sample."""
    return score.status in _ERRORS


class GraderErrors:
    """Counts them."""

    def __init__(self, *, max_share: float) -> None:
        """Above `max_share` the grader is broken."""
        self._max_share = max_share
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def broken_by(self, scores: Sequence[types_pb2.Score]) -> str:
        """Why the grader counts as broken with these scores, in words; empty if it does not.

        A batch without an error ends that, and begins a new count.
        """
        errors = [score for score in scores if is_grader_error(score)]
        if not errors and sum(self._recent) > self._max_share * len(self._recent):
            self._recent.clear()
        self._recent.extend(is_grader_error(score) for score in scores)
        num_errors = sum(self._recent)
        if not errors or len(self._recent) < LEAST or num_errors <= self._max_share * len(self._recent):
            return ""
        name = types_pb2.ScoreStatus.Name(errors[-1].status).removeprefix("SCORE_STATUS_")
        return f"{name} for {num_errors} of the last {len(self._recent)} samples: {errors[-1].message}"
