"""A trainer's backend in two processes (FSDP2 over gloo, or over NCCL on GPUs), and the same in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.batches.packing import Trajectory
from services.trainer.config import TrainingConfig
from services.trainer.distributed import launch
from services.trainer.distributed.coordinator import lead
from services.trainer.distributed.sharded_backend import ShardedBackend
from services.trainer.model.backend import Backend, Quantity
from services.trainer.run.policy_loading import local_backend
from services.trainer.step.prior_passes import Scoring
from tests.helpers.trainers.warm_ranks import WarmRank

DAPO: Mapping[str, object] = {"name": "dapo"}


class LostError(Exception):
    """In place of the end of the process."""


def on_lost(reason: str) -> None:
    raise LostError(reason)


def config_of(
    model: Path,
    *,
    algorithm: Mapping[str, object] = DAPO,
    lora: bool | Mapping[str, object] = False,
    processes: int | tuple[float, ...] = 2,
    gradient_checkpointing: bool | None = False,
    dtype: str = "auto",
    device: str = "cpu",
    parallel: Mapping[str, int] | None = None,
) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"train": None},
            "algorithm": dict(algorithm),
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1000.0},
            "lora": {"rank": 4} | (lora if isinstance(lora, Mapping) else {}) if lora else None,
            "trainer": {
                "device": device,
                "processes": processes,
                "parallel": dict(parallel or {}),
                "gradient_checkpointing": gradient_checkpointing,
            },
        }
    )


@contextmanager
def two_processes(model: Path, **changes) -> Iterator[ShardedBackend]:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "start_rank", WarmRank)
            backend = lead(config_of(model, **changes), build=local_backend, torchrun=None, on_lost=on_lost)
        try:
            yield backend
        finally:
            backend.close()
    finally:
        # One that broke cannot be closed, and this process can have no other while it lasts.
        if dist.is_initialized():
            dist.destroy_process_group()


def alone(model: Path, **changes) -> Backend:
    return local_backend(config_of(model, **{**changes, "processes": 1, "parallel": None}))


def scores(backend: Backend, trajectories: Sequence[Trajectory], quantity: Quantity) -> np.ndarray:
    """As a step asks for them, in small packs."""
    found = Scoring(backend, max_pack_tokens=48, check=lambda: None).of(trajectories, [quantity])
    return np.concatenate([each[quantity] for each in found])


def weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.state_tensors().items()}


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
