"""Measures how much generation and training overlap, from the spans in which either side was busy.

Over the training phase (evaluation at start and end excluded):

    overlap_ratio        = time in which a generator was decoding and the trainer was computing at once
                           / busy time of the less busy side
    trainer_idle_ratio   = 1 - time in which the trainer was computing / length of the phase
    generator_idle_ratio = 1 - time in which at least one generator was decoding / length of the phase

The trainer's spans are those of its compute thread. Generators' spans arrive through the broker, which converts them to
the run's clock by their age; the caller knows the offset of that clock to the trainer's. Network delays blur the spans;
clocks that differ or are adjusted do not. Pure: takes no clock, times are those of the trainer's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SETTLE_AFTER_S = 60.0
"""Spans older than this are added to the totals and forgotten; generators report theirs within seconds."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTotals:
    """Seconds of the training phase; all zero before it."""

    phase_s: float = 0.0
    trainer_busy_s: float = 0.0
    generator_busy_s: float = 0.0
    overlap_s: float = 0.0

    @property
    def overlap_ratio(self) -> float | None:
        """Overlap divided by the busy time of the less busy side; None if a side was never busy."""
        less = min(self.trainer_busy_s, self.generator_busy_s)
        return min(1.0, self.overlap_s / less) if less > 0 else None

    @property
    def trainer_idle_ratio(self) -> float | None:
        """Share of the phase in which the trainer did not compute; None before the phase."""
        return _idle(self.trainer_busy_s, self.phase_s)

    @property
    def generator_idle_ratio(self) -> float | None:
        """Share of the phase in which no generator decoded; None before the phase."""
        return _idle(self.generator_busy_s, self.phase_s)


class OverlapMeter:
    """Adds up spans; `begin` and `end` delimit the training phase, which may be entered several times."""

    def __init__(self) -> None:
        self._settled = OverlapTotals()
        self._settled_until: float | None = None
        self._phases: list[Span] = []
        self._begin: float | None = None
        self._trainer: list[Span] = []
        self._generators: list[Span] = []
        self._last_ends: dict[str, float] = {}

    def restore(self, totals: OverlapTotals) -> None:
        """Continue from the sums of an earlier process of the run; call before the first phase."""
        self._settled = totals

    def begin(self, now_s: float) -> None:
        """The training phase begins."""
        self._begin = now_s

    def end(self, now_s: float) -> None:
        """The training phase ends; harmless outside of one."""
        if self._begin is not None:
            self._phases.append((self._begin, now_s))
            self._begin = None

    def add_trainer_span(self, start_s: float, end_s: float) -> None:
        """The trainer computed."""
        self._trainer.append((start_s, end_s))

    def add_generator_spans(self, generator_id: str, spans: Iterable[Span], *, ahead_s: float = 0.0) -> None:
        """Add a generator's decoding span; a span reported before is not added twice.

        The clock of the spans is `ahead_s` seconds ahead of the trainer's.
        """
        last_end = self._last_ends.get(generator_id, 0.0)
        for start_s, end_s in sorted(spans):
            if end_s > last_end:
                self._generators.append((max(start_s, last_end) - ahead_s, end_s - ahead_s))
                last_end = end_s
        self._last_ends[generator_id] = last_end

    def totals(self, now_s: float) -> OverlapTotals:
        """The totals up to `now_s`, of everything reported so far."""
        since = self._settled_until if self._settled_until is not None else 0.0
        running = [(self._begin, now_s)] if self._begin is not None else []
        phases = _merged(_clipped([*self._phases, *running], since, now_s))
        trainer = _intersection(_merged(self._trainer), phases)
        generators = _intersection(_merged(self._generators), phases)
        return OverlapTotals(
            phase_s=self._settled.phase_s + _length(phases),
            trainer_busy_s=self._settled.trainer_busy_s + _length(trainer),
            generator_busy_s=self._settled.generator_busy_s + _length(generators),
            overlap_s=self._settled.overlap_s + _length(_intersection(trainer, generators)),
        )

    def settle(self, now_s: float) -> None:
        """Add spans older than SETTLE_AFTER_S to the totals and forget them, which bounds memory in long runs."""
        until = now_s - SETTLE_AFTER_S
        if self._settled_until is not None and until < self._settled_until + SETTLE_AFTER_S:
            return
        self._settled = self.totals(until)
        self._settled_until = until
        self._phases = _clipped(self._phases, until, float("inf"))
        self._trainer = _clipped(self._trainer, until, float("inf"))
        self._generators = _clipped(self._generators, until, float("inf"))


def _idle(busy_s: float, phase_s: float) -> float | None:
    return min(1.0, max(0.0, 1.0 - busy_s / phase_s)) if phase_s > 0 else None


def _clipped(spans: Iterable[Span], since: float, until: float) -> list[Span]:
    cut = ((max(start, since), min(end, until)) for start, end in spans)
    return [(start, end) for start, end in cut if end > start]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The union as disjoint spans in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def _intersection(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The intersections of two lists of disjoint, ordered spans."""
    result: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            result.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
