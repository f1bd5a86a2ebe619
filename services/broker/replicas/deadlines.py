"""Pauses time limits while a run's copy is loaded, which takes longer the larger the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from penstock.errors import ServiceUnavailableError
from penstock.process.time_limits import TimeLimit


class Deadlines:
    """The running limits of what `owner` names."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.limits: dict[Deadline, float] = {}
        """Those that run, each with the seconds it had left when it was last paused."""
        self.is_paused = False

    def within(self, limit_s: float) -> Deadline:
        """A block that raises ServiceUnavailableError if it takes longer, pauses excluded."""
        return Deadline(self, limit_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause every limit inside the block."""
        now_s = asyncio.get_running_loop().time
        self.is_paused = True
        for limit in self.limits:
            if limit.end_s is not None and not limit.is_over:
                self.limits[limit] = limit.end_s - now_s()
                limit.reschedule(None)
        try:
            yield
        finally:
            self.is_paused = False
            for limit, left_s in self.limits.items():
                if not limit.is_over:
                    limit.reschedule(left_s)


class Deadline(TimeLimit):
    """See `Deadlines.within`."""

    __slots__ = ("_deadlines", "_whole_s")

    def __init__(self, deadlines: Deadlines, limit_s: float) -> None:
        super().__init__(None if deadlines.is_paused else limit_s)
        self._deadlines, self._whole_s = deadlines, limit_s

    def __enter__(self) -> Self:
        """Start."""
        self._deadlines.limits[self] = self._whole_s
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop. Raises ServiceUnavailableError if the time was up."""
        del self._deadlines.limits[self]
        try:
            super().__exit__(kind, error, traceback)
        except TimeoutError as late:
            raise ServiceUnavailableError(f"{self._deadlines.owner}: no answer in {self._whole_s} s") from late
