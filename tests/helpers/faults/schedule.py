"""When what breaks: a list that follows from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "pause", "cut", "slow", "refuse"]
MEAN_GAP_S = 1.3
LASTS_S: dict[Kind, tuple[float, float]] = {
    "kill": (0.0, 2.0),
    "pause": (0.3, 6.0),
    "cut": (0.0, 0.0),
    "slow": (1.0, 4.0),
    "refuse": (0.3, 3.0),
}
"""Shortest and longest time until it is as before: a killed process is started again, a paused one goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    """After the start of the schedule."""
    kind: Kind
    target: str
    """A process, or a link."""
    lasts_s: float


def make_schedule(seed: int, duration_s: float, *, processes: Sequence[str], links: Sequence[str]) -> list[Fault]:
    """Faults for `duration_s` seconds, in order: at first every kind on every target, shuffled, then any."""
    rng = random.Random(seed)
    every: list[tuple[Kind, str]] = [(kind, name) for name in processes for kind in ("kill", "pause")]
    every += [(kind, name) for name in links for kind in ("cut", "slow", "refuse")]
    first = rng.sample(every, len(every))
    # Killing a trainer is what ends in rewinds.
    every += [("kill", name) for name in processes if name == "trainer"] * 4
    faults = []
    at_s = 1.0
    while at_s < duration_s:
        kind, target = first.pop() if first else rng.choice(every)
        faults.append(Fault(at_s=at_s, kind=kind, target=target, lasts_s=rng.uniform(*LASTS_S[kind])))
        at_s += rng.uniform(0.3, 2 * MEAN_GAP_S - 0.3)
    return faults
