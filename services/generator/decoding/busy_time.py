"""Tracks when this generator was decoding, as merged spans of at least one sample, for heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.clock import Clock

MAX_SPANS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySpan:
    """A span of decoding, by the tracker's clock."""

    start_s: float
    end_s: float


class BusyTracker:
    """Counts samples under way; every busy moment lies in exactly one span that `take_spans` returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoch_s = clock.now_s() - clock.monotonic_s()
        self._num_samples = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._spans: list[BusySpan] = []

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
    def busy_s(self) -> float:
        """Seconds with at least one sample decoding, since start."""
        return self._busy_s + (self.now_s() - self._since_s if self._num_samples else 0.0)

    def take_spans(self) -> list[BusySpan]:
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
        self._spans.append(BusySpan(start_s=self._since_s, end_s=now_s))
        if len(self._spans) > MAX_SPANS:
            self._join_nearest()

    def _join_nearest(self) -> None:
        """Join the two neighbours with the least idle time between them, which then counts as busy."""
        spans = self._spans
        index = min(range(len(spans) - 1), key=lambda i: spans[i + 1].start_s - spans[i].end_s)
        spans[index : index + 2] = [BusySpan(start_s=spans[index].start_s, end_s=spans[index + 1].end_s)]
