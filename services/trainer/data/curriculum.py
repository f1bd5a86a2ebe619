"""Changes the weights of sources as a run goes on, by the stages of its configuration."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from services.trainer.data_config import Stage

WINDOW_GROUPS = 64
"""Groups of a source whose mean pass rate ends a stage; fewer since the stage began do not."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """Where a curriculum is: what a checkpoint holds of it."""

    stage: int = 0
    num_steps: int = 0
    """Steps taken in this stage."""
    pass_rates: dict[str, list[float]] = field(default_factory=dict)
    """By source, of its latest groups in this stage, at most WINDOW_GROUPS."""


class Curriculum:
    """The weights of sources, which depend on the steps taken and what was measured at some of them alone.

    Args:
        stages: Of the configuration; none keeps the weights.
        weights: By source, where a stage does not say otherwise.
    """

    def __init__(self, stages: Sequence[Stage], weights: Mapping[str, float]) -> None:
        self._stages = stages
        self._weights = dict(weights)
        self._place = _Place()

    @property
    def stage(self) -> int:
        """The current stage, counted from 0."""
        return self._place.stage

    def weights(self) -> list[float]:
        """Of each source, now."""
        if not self._stages:
            return list(self._weights.values())
        place, stage = self._place, self._stages[self._place.stage]
        now = self._of(stage)
        if not stage.fades or stage.for_steps is None:
            return now
        done, later = place.num_steps / stage.for_steps, self._of(self._stages[place.stage + 1])
        return [(1.0 - done) * here + done * there for here, there in zip(now, later, strict=True)]

    def note_step(self, pass_rates: Mapping[str, Iterable[float]], accuracies: Mapping[str, float]) -> bool:
        """Count a step; returns whether another stage begins.

        Args:
            pass_rates: Of its groups, by source.
            accuracies: Held-out accuracy by source; only at steps that count one.
        """
        if not self._stages:
            return False
        place, stage = self._place, self._stages[self._place.stage]
        place.num_steps += 1
        for name in stage.until_pass_rate:
            window = deque([*place.pass_rates.get(name, ()), *pass_rates.get(name, ())], maxlen=WINDOW_GROUPS)
            place.pass_rates[name] = list(window)
        if not self._is_over(stage, accuracies):
            return False
        self._place = _Place(stage=place.stage + 1)
        return True

    def dump(self) -> dict[str, Any]:
        """The state as plain values."""
        return asdict(self._place)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the state that `dump` gave; raises ValueError if the configuration has no such stage."""
        place = _Place(**state)
        if place.stage and place.stage >= len(self._stages):
            raise ValueError(f"it is in stage {place.stage} of data.curriculum, which has {len(self._stages)}")
        self._place = place

    def _of(self, stage: Stage) -> list[float]:
        return [stage.weights.get(name, weight) for name, weight in self._weights.items()]

    def _is_over(self, stage: Stage, accuracies: Mapping[str, float]) -> bool:
        place = self._place
        passed = [
            len(rates := place.pass_rates.get(name, [])) == WINDOW_GROUPS and sum(rates) / WINDOW_GROUPS >= least
            for name, least in stage.until_pass_rate.items()
        ]
        measured = [name in accuracies and accuracies[name] >= least for name, least in stage.until_accuracy.items()]
        is_long_enough = stage.for_steps is not None and place.num_steps >= stage.for_steps
        return is_long_enough or any(reached and all(reached) for reached in (passed, measured))
