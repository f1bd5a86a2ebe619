"""Limits how often one batch may fail."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError, ServiceUnavailableError

UNAVAILABLE_COUNTS_EVERY_S = 60.0


class Attempts:
    """Counts the failures of one batch that are the batch's own.

    UNAVAILABLE comes from models that load, drain or are overloaded, and from proxies before them. It counts when calls
    of other batches succeeded meanwhile, and else once in UNAVAILABLE_COUNTS_EVERY_S: samples wait out an interruption
    of minutes, while a sample that breaks the model each time does not hold up a run forever.
    """

    def __init__(self, *, max_tries: int, num_successes: Callable[[], int], monotonic_s: Callable[[], float]) -> None:
        """`num_successes` returns the number of successful calls of the model so far."""
        self._num_left = max_tries
        self._num_successes = num_successes
        self._monotonic_s = monotonic_s
        self._seen_successes: int | None = None
        self._counted_at_s = 0.0

    def are_exhausted_by(self, error: PenstockError) -> bool:
        """Whether the batch is to be given up after this failure."""
        if not error.is_retryable:
            return True
        if not isinstance(error, ServiceUnavailableError) or self._unavailability_counts():
            self._num_left -= 1
            self._seen_successes = self._num_successes()
            self._counted_at_s = self._monotonic_s()
        return self._num_left <= 0

    def grant_one_more(self) -> None:
        """Allow one more try, for a part of the batch."""
        self._num_left = 1

    def _unavailability_counts(self) -> bool:
        if self._seen_successes is None or self._num_successes() > self._seen_successes:
            return True
        return self._monotonic_s() - self._counted_at_s >= UNAVAILABLE_COUNTS_EVERY_S
