"""Collects the numbers that advice rests on, from lines of metrics.jsonl, the summary and the broker's answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WINDOW_STEPS = 50
"""The newest steps, by which a run is judged."""
WARM_UP_STEPS = 2
"""The first steps of a run, which wait for generators that start: left out."""
MIN_STEPS = 5
"""With fewer steps there is no advice."""


@dataclass(slots=True, kw_only=True)
class Occupancy:
    """Means over the polls of a run while it trains: where its samples are, and how idle its generators."""

    num_polls: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)
    """Sums over the polls, samples by state."""
    num_generators: int = 0
    """At the last poll."""
    idle_sum: float = 0.0
    num_idle_polls: int = 0

    def add(self, in_flight: Mapping[str, int], *, num_generators: int, idle_ratio: float | None) -> None:
        """Take in a poll."""
        self.num_polls += 1
        self.in_flight.update(in_flight)
        self.num_generators = num_generators
        if idle_ratio is not None:
            self.idle_sum += idle_ratio
            self.num_idle_polls += 1

    def document(self) -> dict[str, Any]:
        """The means as JSON, for summary.json."""
        polls = max(1, self.num_polls)
        return {
            "in_flight_mean": {name: count / polls for name, count in sorted(self.in_flight.items()) if count},
            "num_generators": self.num_generators,
            "idle_mean": self.idle_sum / self.num_idle_polls if self.num_idle_polls else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a run's newest steps; shares are 0 to 1, None where unknown."""

    num_steps: int
    wait_shares: Mapping[str, float]
    """Share of the steps' time in which training waited, by cause."""
    train_share: float
    """Share of it in which the trainer computed."""
    zero_variance_share: float
    """Share of the groups whose samples all had one reward."""
    reward_mean: float | None
    pack_fill: float | None
    length_mean: float | None
    """Completion tokens."""
    length_max: float | None
    """Mean over the steps of their longest completion, tokens."""
    max_staleness: int | None
    """The run's bound, in versions."""
    dropped: Mapping[str, int]
    """Samples of the whole run, by reason."""
    num_trained: int
    """Samples of the whole run."""
    num_generators: int
    generators_idle: float | None
    """Share of time in which a generator decoded nothing, mean over generators."""
    scoring_share: float | None
    """Share of the samples between their submission and their score that wait for it, or are being scored."""


def measure(
    lines: Sequence[Mapping[str, Any]],
    *,
    occupancy: Mapping[str, Any] | None,
    audit: Mapping[str, Any] | None,
    max_staleness: int | None,
) -> Measured | None:
    """The numbers of a run; None while they are too few, or its lines have no usable times.

    Args:
        lines: Of metrics.jsonl, oldest first; values that are missing or not finite count as not measured.
        occupancy: What `Occupancy.document` makes.
        audit: What `audit_document` makes.
        max_staleness: The run's bound.
    """
    steps = lines[WARM_UP_STEPS:][-WINDOW_STEPS:]
    total_s = _total(steps, "time/step_s")
    if len(steps) < MIN_STEPS or total_s <= 0:
        return None
    waits = {name for step in steps for name in step if name.startswith("wait/")}
    occupancy, audit = occupancy or {}, audit or {}
    return Measured(
        num_steps=len(steps),
        wait_shares={
            name.removeprefix("wait/").removesuffix("_s"): min(1.0, _total(steps, name) / total_s) for name in waits
        },
        train_share=min(1.0, _total(steps, "time/train_s") / total_s),
        zero_variance_share=_ratio(_total(steps, "step/zero_variance_groups"), _total(steps, "step/groups")),
        reward_mean=_mean(steps, "reward/mean"),
        pack_fill=_mean(steps, "step/pack_fill"),
        length_mean=_mean(steps, "length/mean"),
        length_max=_mean(steps, "length/max"),
        max_staleness=max_staleness,
        dropped=dict(audit.get("dropped") or {}),
        num_trained=int(audit.get("trained") or 0),
        num_generators=int(occupancy.get("num_generators") or 0),
        generators_idle=occupancy.get("idle_mean"),
        scoring_share=_scoring_share(occupancy.get("in_flight_mean") or {}),
    )


def _scoring_share(in_flight: Mapping[str, float]) -> float | None:
    scoring = in_flight.get("finished", 0.0) + in_flight.get("scoring", 0.0)
    before = in_flight.get("queued", 0.0) + in_flight.get("leased", 0.0)
    return scoring / (scoring + before) if scoring + before > 0 else None


def _values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = (step.get(name) for step in steps)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _total(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_values(steps, name))


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _values(steps, name)
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
