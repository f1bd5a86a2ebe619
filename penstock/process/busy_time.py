"""Tracks when a process was at work, as merged spans of at least one piece of it: a generator for its heartbeats."""

from __future__ import annotations

from penstock.clock import Clock

MAX_SPANS = 64


Span = tuple[float, float]
"""The start and end of a span of decoding, by the tracker's clock, seconds."""


class BusyTracker:
    """Counts samples under way; every busy moment lies in exactly one span that `take_spans` returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoch_s = clock.now_s() - clock.monotonic_s()
        self._num_samples = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._spans: list[Span] = []

    def now_s(self) -> float:
        """The clock of the spans: the Unix time at its start, then monotonic."""
        return self._epoch_s + self._clock.monotonic_s()

    def begin(self) -> None:
        """A sample begins to decode."""
        if self._num_samples == 0:
            self._since_s = self.now_s()
        self._num_samples += 1

    def end(self) -> None:
        """A sample ended."""
        if self._num_samples == 0:
            raise ValueError("no sample is under way")
        self._num_samples -= 1
        if self._num_samples == 0:
            self._close(self.now_s())

    @property
    def is_busy(self) -> bool:
        """Whether a sample is under way."""
        return self._num_samples > 0

    @property
    def busy_s(self) -> float:
        """Seconds with at least one sample decoding, since start."""
        return self._busy_s + (self.now_s() - self._since_s if self._num_samples else 0.0)

    def take_spans(self) -> list[Span]:
        """Spans since the last call, in order, at most MAX_SPANS; an open one is split here."""
        if self._num_samples:
            now_s = self.now_s()
            self._close(now_s)
            self._since_s = now_s
        spans, self._spans = self._spans, []
        return spans

    def _close(self, now_s: float) -> None:
        if now_s <= self._since_s:
            return
        self._busy_s += now_s - self._since_s
        self._spans.append((self._since_s, now_s))
        if len(self._spans) > MAX_SPANS:
            self._join_nearest()

    def _join_nearest(self) -> None:
        """Join the two neighbours with the least idle time between them, which then counts as busy."""
        spans = self._spans
        index = min(range(len(spans) - 1), key=lambda i: spans[i + 1][0] - spans[i][1])
        spans[index : index + 2] = [(spans[index][0], spans[index + 1][1])]
