"""Divides a model's layers between the stages of a pipeline by their speed, memory and network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage takes, by the number of its layers."""

    layer_s: float
    """Of a microbatch, each layer."""
    extra_s: float
    """Of a microbatch, what it has beside its layers."""
    gather_layer_s: float
    """Of a pack, exchanges for each layer."""
    gather_extra_s: float

    def slot_s(self, num_layers: int) -> float:
        """Of a microbatch."""
        return self.extra_s + num_layers * self.layer_s

    def gather_s(self, num_layers: int) -> float:
        """Of a pack."""
        return self.gather_extra_s + num_layers * self.gather_layer_s


@dataclass(frozen=True, slots=True)
class Passage:
    """A pack's way through a pipeline and back."""

    stages: Sequence[StageCost]
    links_s: Sequence[float]
    """Of a microbatch, between two stages."""
    rounds: int
    """Microbatches of the pack."""
    overlap: float
    """Share of the computation that hides exchanges inside stages."""

    def compute_s(self, layers: Sequence[int]) -> float:
        """The first microbatch takes the sum of stages and links, each further one the slowest of them."""
        slots = [stage.slot_s(num) for stage, num in zip(self.stages, layers, strict=True)]
        return sum(slots) + sum(self.links_s) + (self.rounds - 1) * max([*slots, *self.links_s])

    def hidden_s(self, layers: Sequence[int]) -> float:
        """Exchanges of the stage that has most."""
        return max(stage.gather_s(num) for stage, num in zip(self.stages, layers, strict=True))

    def total_s(self, layers: Sequence[int]) -> float:
        """All of it."""
        compute_s = self.compute_s(layers)
        return compute_s + max(0.0, self.hidden_s(layers) - self.overlap * compute_s)


def divide_layers(num_layers: int, passage: Passage, most: Sequence[int]) -> tuple[int, ...] | None:
    """Layers of each stage, at least one, that make a pack's passage shortest; None if memory is too small.

    Exact: for each time that the slowest stage may take, layers go to the fastest stages first, as far as time and
    memory allow, which makes the sum of all least. Where exchanges are not hidden by the best of these, they are
    limited to less than its, until the computation alone takes longer than what was found.

    Args:
        num_layers: Of the model.
        passage: What stages take.
        most: Layers that fit into each of them.
    """
    best: tuple[int, ...] | None = None
    best_s = inf
    allowed = list(most)
    while (layers := _fastest(num_layers, passage, allowed)) is not None and passage.compute_s(layers) < best_s:
        if (total_s := passage.total_s(layers)) < best_s:
            best, best_s = layers, total_s
        hidden_s = passage.hidden_s(layers)
        if hidden_s <= passage.overlap * passage.compute_s(layers):
            break
        allowed = [
            max((num for num in range(limit + 1) if stage.gather_s(num) < hidden_s * (1 - 1e-12)), default=0)
            for stage, limit in zip(passage.stages, allowed, strict=True)
        ]
    return best


def _fastest(num_layers: int, passage: Passage, most: Sequence[int]) -> tuple[int, ...] | None:
    """The division that computes fastest."""
    stages = passage.stages
    if min(most) < 1 or sum(most) < num_layers or len(stages) > num_layers:
        return None
    order = sorted(range(len(stages)), key=lambda index: stages[index].layer_s)
    least_sum_s = num_layers * stages[order[0]].layer_s + sum(stage.extra_s for stage in stages) + sum(passage.links_s)
    best: tuple[float, tuple[int, ...]] | None = None
    for limit_s in _limits(num_layers, passage, most):
        if best is not None and (passage.rounds - 1) * limit_s + least_sum_s >= best[0]:
            break
        allowed = [
            min(limit, int((limit_s * (1 + 1e-9) - stage.extra_s) / stage.layer_s))
            for stage, limit in zip(stages, most, strict=True)
        ]
        if min(allowed) < 1 or sum(allowed) < num_layers:
            continue
        layers, rest = [1] * len(stages), num_layers - len(stages)
        for index in order:
            more = min(rest, allowed[index] - 1)
            layers[index] += more
            rest -= more
        found = (passage.compute_s(layers), tuple(layers))
        best = found if best is None else min(best, found)
    return None if best is None else best[1]


def _limits(num_layers: int, passage: Passage, most: Sequence[int]) -> Iterator[float]:
    """Times that the slowest stage or link may take, ascending, from the least that all layers fit into."""
    floor_s = max(passage.links_s, default=0.0)
    times = sorted(
        {
            stage.slot_s(num)
            for stage, limit in zip(passage.stages, most, strict=True)
            for num in range(1, min(limit, num_layers) + 1)
        }
    )
    yield floor_s
    yield from (limit_s for limit_s in times if limit_s > floor_s)
