"""The mesh of a trainer's processes: what fits their number, and what is refused by name."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError, validate
from services.trainer.config import TrainingConfig
from services.trainer.run_sections import ComputeConfig


def made(**settings: object) -> ComputeConfig:
    return validate(ComputeConfig, settings, source="run.yaml")


@pytest.mark.parametrize(
    ("processes", "parallel", "mesh"),
    [
        (1, {}, (1, 1)),
        (8, {}, (1, 8)),
        (8, {"replicate": 2}, (2, 4)),
        (8, {"replicate": 8}, (8, 1)),
        (8, {"replicate": 2, "shard": 4}, (2, 4)),
        ([1, 2], {"shard": 2}, (1, 2)),
        (2, {"pipeline": 2, "layers_per_stage": [1, 3]}, (1, 1)),
        ([1, 1, 2, 2], {"pipeline": 2, "replicate": 2}, (2, 1)),
        ([1, 2, 1, 2], {"pipeline": 2}, (1, 2)),
        (8, {"tensor": 2}, (1, 4)),
        (8, {"tensor": 2, "replicate": 2}, (2, 2)),
        ([1, 1, 2, 2], {"tensor": 2, "shard": 2}, (1, 2)),
        (8, {"expert": 4}, (1, 8)),
        ([1, 2, 1, 2], {"expert": 2, "replicate": 2}, (2, 2)),
    ],
)
def test_what_is_left_out_is_sharded(processes, parallel, mesh):
    config = made(processes=processes, parallel=parallel)
    assert config.parallel.mesh(len(config.shares)) == mesh


@pytest.mark.parametrize(
    ("processes", "parallel", "told"),
    [
        (8, {"replicate": 3}, "replicate 3 x shard 2 needs 6 processes, and processes states 8"),
        (4, {"shard": 8}, "replicate 1 x shard 8 needs 8 processes, and processes states 4"),
        (1, {"replicate": 2}, "replicate 2 x shard 1 needs 2 processes, and processes states 1"),
        (4, {"replicate": 2, "shard": 1}, "replicate 2 x shard 1 needs 2 processes, and processes states 4"),
        (4, {"tensor": 3}, "replicate 1 x shard 1 x tensor 3 needs 3 processes, and processes states 4"),
        (4, {"pipeline": 2, "tensor": 2}, "tensor: 2 is not supported with pipeline; leave it 1, use replicate"),
        ([1, 2], {"tensor": 2}, "processes: [1.0, 2.0] are processes that split layers between them, which have one"),
        (3, {"islands": [2, 1], "tensor": 2}, "tensor 2 is not supported beside them; leave it out"),
        (3, {"pipeline": 2}, "replicate 1 x shard 1 x pipeline 2 needs 2 processes, and processes states 3"),
        (2, {"pipeline": 2, "layers_per_stage": [4]}, "layers_per_stage: [4] states 1 stages, and pipeline 2"),
        (2, {"layers_per_stage": [1, 3]}, "layers_per_stage: [1, 3] states 2 stages, and pipeline 1"),
        (2, {"pipeline": 2, "layers_per_stage": [0, 4]}, "layers_per_stage"),
        ([1, 2], {"pipeline": 2}, "processes: [1.0, 2.0] are the stages of one pipeline, which have one share"),
        (8, {"expert": 3}, "expert 3 does not divide shard 8, the processes that hold one copy; change one of them"),
        (4, {"expert": 4, "replicate": 2}, "expert 4 does not divide shard 2"),
        (4, {"expert": 2, "tensor": 2}, "expert: 2 is not supported with tensor, which divides experts as well"),
        (4, {"expert": 2, "pipeline": 2}, "expert: 2 is not supported with pipeline"),
        (3, {"islands": [2, 1], "expert": 2}, "expert 2 is not supported beside them; leave it out"),
        (4, {"context": 2}, "context: 2 is not supported, a sample is computed whole by one process"),
        (3, {"islands": [2, 2]}, "islands [2, 2] need 4 processes, and processes states 3; change one of them"),
        (3, {"islands": [2, 1], "replicate": 3}, "replicate 3 is not supported beside them; leave it out"),
        (3, {"islands": [2, 1], "shard": 2}, "shard 2 is not supported beside them"),
        (3, {"islands": [3]}, "parallel.islands"),
        (4, {"replicate": 0}, "parallel.replicate"),
        (4, {"data": 2}, "parallel.data"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(processes, parallel, told):
    with pytest.raises(ConfigError) as caught:
        made(processes=processes, parallel=parallel)
    assert told in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("direction", "other", "told"),
    [
        ("pipeline", {"lora": {"rank": 4}, "algorithm": {"name": "ppo"}}, "with lora beside the critic of ppo"),
        ("tensor", {"lora": {"rank": 4}, "algorithm": {"name": "ppo"}}, "with lora beside the critic of ppo"),
    ],
)
def test_what_cannot_be_cut_or_split_is_refused_by_name(direction, other, told):
    run = {"model": {"path": "m"}, "data": {"train": None}, "trainer": {"processes": 2, "parallel": {direction: 2}}}
    with pytest.raises(ConfigError) as caught:
        validate(TrainingConfig, run | other, source="run.yaml")
    assert f"trainer.parallel.{direction}: 2 is not supported {told}" in str(caught.value)


def test_islands_have_all_processes_and_their_shares():
    config = made(processes=[1, 1, 2], parallel={"islands": [2, 1]})
    assert config.parallel.mesh(3) == (2, 2)
    assert config.shares == (1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("parallel", "together"),
    [
        ({}, [[0], [1], [2], [3]]),
        ({"tensor": 2}, [[0, 1], [2, 3]]),
        ({"pipeline": 2, "replicate": 2}, [[0, 1], [2, 3]]),
        ({"pipeline": 2, "shard": 2}, [[0, 2], [1, 3]]),
        ({"islands": [3, 1]}, [[0], [1], [2], [3]]),
    ],
)
def test_who_has_packs_together(parallel, together):
    assert [[*ranks] for ranks in made(processes=4, parallel=parallel).parallel.together(4)] == together
