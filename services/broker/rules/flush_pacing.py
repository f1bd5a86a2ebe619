"""Decides how long generators gather tokens before they send them, so that a busy broker gets larger chunks. Pure.

Nearly all that tokens cost a broker is per chunk and per request: at an interval n times as long the same tokens cost
about an n-th. The interval follows the process's load, the larger of two shares:

- of its time that the thread of its event loop works, or waits for a core;
- of that interval that a token request waits for its answer, where the store or other brokers are what is slow.

It rises by half at each update while the load is above BUSY, and falls by at most a twentieth while it is below CALM,
no further than where the load would be AIM; so it settles between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.clock import Clock

SHORTEST_S = 0.2
"""The generators' default, below which nothing is asked for."""
DEFAULT_LONGEST_S = 2.0
BUSY, AIM, CALM = 0.85, 0.7, 0.5
RISE, FALL = 1.5, 0.95
UPDATE_EVERY_S = 0.5


class FlushInterval:
    """The interval that one broker process asks for, at most `longest_s` seconds; see the module.

    The load is smoothed over about two updates: a single long operation is no reason to ask for anything.
    """

    def __init__(self, longest_s: float = DEFAULT_LONGEST_S) -> None:
        self._longest_s = longest_s
        self._interval_s = SHORTEST_S
        self._load = 0.0
        self._waiting = 0.0
        """Share of the interval that the latest requests waited for."""
        self._num_unanswered = 0
        self._answers_s, self._num_answers = 0.0, 0

    @property
    def asked_s(self) -> float:
        """The interval, seconds; 0 while generators may use their own."""
        return self._interval_s if self._interval_s > SHORTEST_S else 0.0

    @property
    def load(self) -> float:
        """The smoothed load, 0 to 1."""
        return self._load

    @contextmanager
    def answering(self, clock: Clock) -> Iterator[None]:
        """Measures how long a token request that was read waits for its answer, which is made in the block."""
        read_s = clock.monotonic_s()
        self._num_unanswered += 1
        try:
            yield
        finally:
            self._num_unanswered -= 1
            self._answers_s += clock.monotonic_s() - read_s
            self._num_answers += 1

    def update(self, busy: float) -> None:
        """Take the share of time that the loop's thread worked since the last update, due every UPDATE_EVERY_S."""
        if self._num_answers:
            self._waiting = self._answers_s / self._num_answers / self._interval_s
        elif not self._num_unanswered:
            self._waiting = 0.0
        self._answers_s, self._num_answers = 0.0, 0
        self._load = (self._load + min(1.0, max(0.0, busy, self._waiting))) / 2
        self._interval_s = followed(
            self._interval_s, self._load, shortest_s=SHORTEST_S, longest_s=max(SHORTEST_S, self._longest_s)
        )


def followed(interval_s: float, load: float, *, shortest_s: float, longest_s: float) -> float:
    """The interval after one update, within its bounds: longer under a high load, shorter under a low one."""
    if load > BUSY:
        interval_s *= RISE
    elif load < CALM:
        interval_s *= max(FALL, load / AIM)
    return max(shortest_s, min(interval_s, longest_s))
