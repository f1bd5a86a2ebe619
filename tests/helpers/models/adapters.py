"""LoRA adapters over the tiny model: made by the trainer's own backend, given to engines."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path

import torch

from penstock.v1.weights_pb2 import AdapterInfo
from services.generator.engine.engine import WeightUpdate
from services.trainer.algorithms.dapo import DAPO
from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.adapters.lora import ADAPTER_FILE
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import LoraSection, OptimizerConfig
from tests.helpers.models.tiny_model import make_update

LORA = LoraSection(rank=4, alpha=12.0, target_modules=("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"))


def make_backend(model_path: Path, lora: LoraSection = LORA) -> RankBackend:
    """A trainer's backend with an adapter."""
    return RankBackend(
        model=ModelSettings(path=model_path, lora=lora),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        loss=partial(policy_loss, algorithm=DAPO, settings=LossSettings(clip=DAPO.clip)),
        seed=0,
    )


def fill(backend: RankBackend, *, seed: int) -> None:
    """Give the adapter numbers that change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in backend.state_tensors().values():
            tensor.copy_(0.15 * torch.randn(tensor.shape, generator=generator))


def adapter_update(backend: RankBackend, folder: Path, *, policy_version: int) -> WeightUpdate:
    """The backend's adapter as an update, saved below `folder`."""
    target = folder / f"adapter-{policy_version}"
    target.mkdir()
    backend.write_weights(target / ADAPTER_FILE).result()
    backend._trained.complete(target)
    update = make_update(target / ADAPTER_FILE, policy_version=policy_version)
    return dataclasses.replace(update, adapter=backend.adapter)


def another_base(adapter: AdapterInfo) -> AdapterInfo:
    """The same over another base."""
    other = copy.deepcopy(adapter)
    other.base_digest = "0" * 64
    return other
