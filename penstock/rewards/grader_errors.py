"""Tells when a grader is broken: by its share of errors among the last samples, or since it can use no row at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.rewards.score_messages import GRADER_ERRORS
from penstock.v1 import types_pb2

WINDOW, LEAST = 64, 16
"""Samples looked back on, and how many say anything."""


def is_grader_error(score: types_pb2.Score) -> bool:
    """Whether the grader failed, in whatever way."""
    return score.status in GRADER_ERRORS


def may_pass(score: types_pb2.Score) -> bool:
    """Whether such an error is tried again at once. A call that took too long would take as long again."""
    return is_grader_error(score) and score.status != types_pb2.SCORE_STATUS_TIMEOUT


class GraderErrors:
    """Counts them."""

    def __init__(self, *, max_share: float) -> None:
        """Above `max_share` the grader is broken."""
        self._max_share = max_share
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._num_invalid = 0
        self._has_used_row = False

    def holds(self, score: types_pb2.Score) -> bool:
        """Whether the sample waits until the grader is mended, since nothing is given up while it is broken."""
        if is_grader_error(score):
            return self.is_broken
        return score.status == types_pb2.SCORE_STATUS_INVALID and self.finds_no_row

    @property
    def finds_no_row(self) -> bool:
        """Whether all samples ever seen were invalid, and enough of them: data and reward do not fit each other."""
        return not self._has_used_row and self._num_invalid >= WINDOW

    @property
    def is_broken(self) -> bool:
        """Whether the grader counts as broken."""
        return len(self._recent) >= LEAST and sum(self._recent) > self._max_share * len(self._recent)

    def broken_by(self, scores: Sequence[types_pb2.Score], *, are_new: bool = True) -> str:
        """Why the grader counts as broken with these scores, in words; empty if it does not.

        A batch without an error ends that, and begins a new count. Samples count once: unless `are_new`, these do not.
        """
        num_invalid = sum(score.status == types_pb2.SCORE_STATUS_INVALID for score in scores)
        self._has_used_row = self._has_used_row or num_invalid < len(scores)
        self._num_invalid += num_invalid if are_new else 0
        if self.finds_no_row:
            return f"INVALID for each of the {self._num_invalid} samples so far: {scores[-1].message}"
        errors = [score for score in scores if is_grader_error(score)]
        if not errors and self.is_broken:
            self._recent.clear()
        if are_new:
            self._recent.extend(is_grader_error(score) for score in scores)
        if not errors or not self.is_broken:
            return ""
        name = types_pb2.ScoreStatus.Name(errors[-1].status).removeprefix("SCORE_STATUS_")
        return f"{name} for {sum(self._recent)} of the last {len(self._recent)} samples: {errors[-1].message}"
