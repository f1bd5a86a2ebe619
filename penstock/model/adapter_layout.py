"""LoRA adapters as trainers and receivers agree on them: what they apply to, and which tensors they consist of.

An adapted layer computes W x + (alpha / rank) B A x (Hu et al., LoRA, arXiv 2106.09685, section 4.1). Tensors are named
as PEFT names them: base_model.model.LAYER.lora_A.weight is A, [rank, inputs], and base_model.model.LAYER.lora_B.weight
is B, [outputs, rank].

Needs hashlib and nothing heavier. Promises:

- An adapter names its base by digest, so it is never applied to weights other than those it was trained on.
- Input from the network is checked before it is used: `adapter_of` for the statement, `adapter_layout` for
  names and shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from penstock.errors import require
from penstock.model.digests import WeightsMismatchError, manifest_digest, safetensors_digests
from penstock.v1.weights_pb2 import AdapterInfo, WeightsManifest

MAX_RANK = 512
"""The highest that every engine takes."""
MAX_TARGET_MODULES = 256
NAME_PREFIX = "base_model.model."
"""Of all tensors: PEFT's model around the base."""
MODULE_NAME = re.compile(r"[A-Za-z0-9_]{1,128}")
"""The last part of a layer's name."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BaseMismatchError(WeightsMismatchError):
    """An adapter was trained on a base other than the one loaded."""


def scaling(adapter: AdapterInfo) -> float:
    """The factor applied to B A."""
    return adapter.alpha / adapter.rank


def model_digest(directory: Path) -> str:
    """The manifest digest of all tensors in the safetensors files of a Hugging Face directory; reads them whole.

    Of SHA-256 digests: adapters on disk state it.

    Raises:
        OSError: There are none, or they cannot be read.
        MalformedWeightsError: One is not safetensors.
        ValueError: Two files hold tensors of the same name.
    """
    return manifest_digest(
        [tensor for path in weight_files(directory) for tensor in safetensors_digests(path, "sha256")]
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory; raises FileNotFoundError if there are none."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{directory}: no safetensors weights; adapters need them to name their base")
    return paths


def check_base(adapter: AdapterInfo, *, held_digest: str) -> None:
    """Raise BaseMismatchError, which names both digests, unless the adapter was trained on the loaded base."""
    if adapter.base_digest != held_digest:
        raise BaseMismatchError(
            f"the adapter applies to base weights with digest {adapter.base_digest}, the base held here has "
            f"{held_digest}; use the model that the trainer was started with",
            base_digest=adapter.base_digest,
            held_digest=held_digest,
        )


def adapter_of(manifest: WeightsManifest) -> AdapterInfo | None:
    """The manifest's statement of its adapter, checked; None if the version is not an adapter.

    Raises:
        InvalidFieldError: A field is missing or out of bounds.
    """
    if not manifest.HasField("adapter"):
        return None
    info = manifest.adapter
    is_digest = _DIGEST.fullmatch(info.base_digest) is not None
    require(is_digest, "manifest.adapter.base_digest", info.base_digest[:100], "64 hex digits")
    require(1 <= info.rank <= MAX_RANK, "manifest.adapter.rank", info.rank, f"1 to {MAX_RANK}")
    require(math.isfinite(info.alpha) and info.alpha > 0, "manifest.adapter.alpha", info.alpha, "a positive number")
    modules = info.target_modules
    are_modules = 1 <= len(modules) <= MAX_TARGET_MODULES and all(MODULE_NAME.fullmatch(module) for module in modules)
    names = f"1 to {MAX_TARGET_MODULES} names of layers"
    require(are_modules, "manifest.adapter.target_modules", ", ".join(modules)[:100], names)
    return info


def adapter_layout(base: Mapping[str, tuple[int, ...]], adapter: AdapterInfo) -> dict[str, tuple[int, ...]]:
    """The tensors that an adapter consists of, names to shapes.

    Args:
        base: The tensors of its base, by their Hugging Face names.
        adapter: How it is applied.
    """
    layout: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        layer = name.removesuffix(".weight")
        if layer != name and len(shape) == 2 and layer.rpartition(".")[2] in adapter.target_modules:
            num_outputs, num_inputs = shape
            layout[factor_name(layer, "A")] = (adapter.rank, num_inputs)
            layout[factor_name(layer, "B")] = (num_outputs, adapter.rank)
    return layout


def factor_name(layer: str, factor: Literal["A", "B"]) -> str:
    """The name of a layer's A or B."""
    return f"{NAME_PREFIX}{layer}.lora_{factor}.weight"
