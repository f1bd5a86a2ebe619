"""Layers are divided between unlike stages as well as by trying every division."""

import itertools
import random

import pytest

from services.scheduler.meshes.layer_division import Passage, StageCost, divide_layers


def drawn(seed: int) -> tuple[int, Passage, list[int]]:
    rng = random.Random(seed)
    num_stages = rng.randint(2, 4)
    num_layers = rng.randint(num_stages, 11)
    stages = [
        StageCost(
            layer_s=rng.choice([1.0, 1.0, 2.5, 7.0]),
            extra_s=rng.choice([0.0, 3.0]),
            gather_layer_s=rng.choice([0.0, 1.0, 6.0]),
            gather_extra_s=rng.choice([0.0, 2.0]),
        )
        for _ in range(num_stages)
    ]
    links_s = [rng.choice([0.0, 1.0, 8.0]) for _ in range(num_stages - 1)]
    passage = Passage(stages, links_s, rounds=rng.choice([1, 2, 8]), overlap=0.8)
    return num_layers, passage, [rng.randint(1, num_layers) for _ in range(num_stages)]


@pytest.mark.parametrize("seed", range(200))
def test_no_division_is_faster(seed: int) -> None:
    num_layers, passage, most = drawn(seed)
    fitting = [
        layers for layers in itertools.product(*(range(1, limit + 1) for limit in most)) if sum(layers) == num_layers
    ]
    found = divide_layers(num_layers, passage, most)
    if not fitting:
        assert found is None
        return
    assert found in fitting
    assert passage.total_s(found) == pytest.approx(min(map(passage.total_s, fitting)), rel=1e-12)
