"""Divides a model's layers between the stages of a pipeline by their speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain


def divide_layers(
    num_layers: int,
    *,
    layer_s: Sequence[float],
    extra_s: Sequence[float],
    most: Sequence[int],
    rounds: int,
) -> tuple[int, ...] | None:
    """Layers of each stage, at least one, that make a pack's passage shortest; None if memory is too small.

    A pack of `rounds` microbatches takes the sum of all stages and `rounds - 1` times the slowest one. For each time
    that the slowest may take, layers go to the fastest stages first, as far as time and memory allow, which makes the
    sum least; of all such times the best is taken. This is exact.

    Args:
        num_layers: Of the model.
        layer_s: Time of one layer, by stage.
        extra_s: Time of what a stage has beside its layers.
        most: Layers that fit into a stage.
        rounds: Microbatches of a pack.
    """
    stages = range(len(layer_s))
    if min(most) < 1 or sum(most) < num_layers or len(layer_s) > num_layers:
        return None
    fastest = sorted(stages, key=lambda stage: layer_s[stage])
    least_sum_s = num_layers * layer_s[fastest[0]] + sum(extra_s)
    slowest_s = sorted(
        set(
            chain.from_iterable(
                (extra_s[stage] + layers * layer_s[stage] for layers in range(1, most[stage] + 1)) for stage in stages
            )
        )
    )
    best: tuple[float, tuple[int, ...]] | None = None
    for limit_s in slowest_s:
        if best is not None and (rounds - 1) * limit_s + least_sum_s >= best[0]:
            break
        allowed = [min(most[stage], int((limit_s * (1 + 1e-12) - extra_s[stage]) / layer_s[stage])) for stage in stages]
        if min(allowed) < 1 or sum(allowed) < num_layers:
            continue
        layers, rest = [1] * len(layer_s), num_layers - len(layer_s)
        for stage in fastest:
            more = min(rest, allowed[stage] - 1)
            layers[stage] += more
            rest -= more
        sum_s = sum(extra_s[stage] + layers[stage] * layer_s[stage] for stage in stages)
        found = (rounds - 1) * limit_s + sum_s
        if best is None or found < best[0]:
            best = (found, tuple(layers))
    return None if best is None else best[1]
