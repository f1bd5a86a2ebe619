"""Checks by which every engine refuses an unsuitable LoRA adapter before it touches its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.model.adapter_layout import adapter_layout, check_base
from penstock.model.digests import check_layout
from penstock.v1.weights_pb2 import AdapterInfo
from services.generator.engine.engine import EngineError, WeightUpdate

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBase:
    """The model that adapters are applied to."""

    digest: str
    """`penstock.model.adapter_layout.model_digest` of its folder."""
    layout: Mapping[str, tuple[int, ...]]
    """Its tensors, Hugging Face names to shapes."""
    max_rank: int
    """Highest rank that the engine supports."""


def check_update(update: WeightUpdate, base: AdapterBase | None) -> None:
    """Refuse what this engine was not started for; `base` is None if it takes whole models.

    Raises:
        EngineError: An adapter for an engine that was started for whole models, or the other way round, or its rank
            is above the engine's.
        BaseMismatchError: It applies to another base; both digests are named.
        WeightsMismatchError: Its tensors are not those of such an adapter over this base.
    """
    adapter = update.adapter
    if base is None:
        if adapter is not None:
            what = f"version {update.policy_version} is a LoRA adapter of rank {adapter.rank}"
            raise EngineError(f"{what}; start the engine with max_lora_rank={adapter.rank} or higher")
        return
    if adapter is None:
        what = f"version {update.policy_version} is a whole model, this engine was started for LoRA adapters"
        raise EngineError(f"{what}; leave max_lora_rank unset")
    if adapter.rank > base.max_rank:
        what = f"version {update.policy_version} has rank {adapter.rank}, max_lora_rank is {base.max_rank}"
        raise EngineError(f"{what}; raise it")
    check_base(adapter, held_digest=base.digest)
    check_layout(adapter_layout(base.layout, adapter), update.tensors)


def write_peft_folder(folder: Path, *, path: Path, adapter: AdapterInfo) -> Path:
    """Make `folder` what PEFT and vLLM read an adapter from: the file at `path`, linked, and its configuration."""
    folder.mkdir(parents=True)
    (folder / ADAPTER_FILE).symlink_to(path.absolute())
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.target_modules),
        "bias": "none",
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder
