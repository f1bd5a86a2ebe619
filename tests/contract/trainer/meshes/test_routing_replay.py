"""Processes that each replay the routes of their own packs train as one process does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.trainer.batches.packing import Trajectory
from services.trainer.batches.rank_partition import partition
from services.trainer.model.backend import Backend
from tests.helpers.trainers.equal_training import assert_stepped_alike, made, random_trajectories
from tests.helpers.trainers.two_processes import alone, scores, two_processes

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
REPLAY = {"name": "dapo", "routing_replay": True}


def routed(seed: int) -> list[Trajectory]:
    """Samples with arbitrary experts, two of four in each of four layers."""
    rng = np.random.default_rng(seed)
    found = []
    for each in random_trajectories(seed):
        order = rng.permuted(np.tile(np.arange(4, dtype=np.uint8), (each.token_ids.size, 4, 1)), axis=-1)
        found.append(replace(each, routes=order[..., :2].copy()))
    return found


def step(backend: Backend) -> float:
    rounds = partition(routed(1), max_pack_tokens=48, shares=backend.shares)
    totals = [backend.forward_backward(*packs) for packs in rounds]
    backend.optimizer_step(divisor=sum(each.num_tokens for each in totals))
    return sum(each.sums["mismatch_kl"] for each in totals)


@pytest.mark.parametrize(
    "parallel",
    [{}, pytest.param({"replicate": 2}, marks=pytest.mark.grid), {"islands": [1, 1]}],
    ids=["shard", "replicate", "islands"],
)
def test_each_process_replays_its_own_packs(tmp_path: Path, parallel: Mapping[str, int]) -> None:
    model = made(tmp_path / "model", "qwen3_moe", is_tied=False)
    changes = {"algorithm": REPLAY, "gradient_checkpointing": True}
    with two_processes(model, parallel=parallel, **changes) as many:
        one = alone(model, **changes)
        found, expected = (scores(backend, routed(9), "logprobs") for backend in (many, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        own = scores(alone(model), random_trajectories(9), "logprobs")
        assert np.abs(own - expected).max() > 1e-2
        assert step(many) == pytest.approx(step(one), rel=1e-5)
        assert_stepped_alike(many, one)
