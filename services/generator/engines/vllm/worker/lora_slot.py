"""Replaces the LoRA adapter inside a vLLM worker, and reads back what the kernels multiply by.

vLLM keeps adapters beside the base, in slots; the engine has one slot, under one name for all versions, so that samples
under way decode with the new version as soon as it is loaded. Promises:

- The values read back are those in the slot, layer by layer; a layer that the file does not adapt must hold zeros.
- vLLM folds the scale into B on loading; the expected B is computed here in the same way:
  rounded to the slot's type, then multiplied.
- With tensor-parallel workers, the rows of each follow vLLM's own slicing; a pipeline stage has its own layers only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest

from penstock.model.adapter_layout import factor_name
from services.generator.engine.lora_checks import ADAPTER_FILE
from services.generator.engines.vllm.comparison import Comparison

ADAPTER_NAME = "policy"
ADAPTER_ID = 1
_SLOT = 0
_Factors = list[torch.Tensor | None]


def adapter_request(folder: Path | str, *, replaces: bool = False) -> LoRARequest:
    """The engine's adapter: for a sample, or to load the folder's in its place."""
    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=replaces)


def install_adapter(worker: Any, folder: str, scaling: float) -> Comparison:
    """Loads the adapter of a PEFT folder; returns what `compared_adapter` finds in the worker afterwards."""
    worker.add_lora(adapter_request(folder, replaces=True))
    with torch.inference_mode():
        return compared_adapter(worker.model_runner.get_model(), Path(folder) / ADAPTER_FILE, scaling)


def compared_adapter(model: nn.Module, path: Path, scaling: float) -> Comparison:
    """Compares slot and file in this worker's layers; a layer that is adapted in the slot only differs, by its name."""
    tensors = load_file(path)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    differing: set[str] = set()
    equal: set[str] = set()
    for layer, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            parts = _parts(layer, packed)
            names = {factor_name(part, factor) for part in parts for factor in ("A", "B")} & tensors.keys()
            if _holds(module, parts, tensors, scaling):
                equal |= names
            else:
                differing |= names or {layer}
    return {"differing": sorted(differing), "equal": sorted(equal - differing)}


def _parts(layer: str, packed: dict[str, list[str]]) -> list[str]:
    parent, _, own_name = layer.rpartition(".")
    return [f"{parent}.{part}" for part in packed.get(own_name, [own_name])]


def _holds(module: Any, parts: list[str], tensors: dict[str, torch.Tensor], scaling: float) -> bool:
    slots_a, slots_b = _slots(module.lora_a_stacked), _slots(module.lora_b_stacked)
    all_a: _Factors = [tensors.get(factor_name(part, "A")) for part in parts]
    all_b: _Factors = [tensors.get(factor_name(part, "B")) for part in parts]
    if all(factor is None for factor in (*all_a, *all_b)):
        return not any(slot.any() for slot in (*slots_a, *slots_b))
    if not len(slots_a) == len(slots_b) == len(parts):
        return False
    all_a, all_b = _own_shards(module, all_a, all_b)
    are_a = all(_equals(slot, factor, 1.0) for slot, factor in zip(slots_a, all_a, strict=True))
    return are_a and all(_equals(slot, factor, scaling) for slot, factor in zip(slots_b, all_b, strict=True))


def _slots(stacked: Any) -> list[torch.Tensor]:
    stacks = [stacked] if isinstance(stacked, torch.Tensor) else stacked
    return [stack[_SLOT].reshape(stack.shape[-2:]) for stack in stacks]


def _own_shards(module: Any, all_a: _Factors, all_b: _Factors) -> tuple[_Factors, _Factors]:
    """This worker's part of each factor, if the layer is split over several workers."""
    if module.tp_size == 1:
        return all_a, all_b
    if len(all_a) > 1:
        return module.slice_lora_a(all_a), module.slice_lora_b(all_b)
    return [module.slice_lora_a(all_a[0])], [module.slice_lora_b(all_b[0])]


def _equals(slot: torch.Tensor, factor: torch.Tensor | None, scaling: float) -> bool:
    """Whether the slot equals the factor, with zeros beyond it."""
    expected = torch.zeros_like(slot)
    if factor is not None:
        num_rows, num_columns = factor.shape
        scaled = factor.to(slot.dtype)
        if scaling != 1:
            scaled = scaled * scaling
        expected[:num_rows, :num_columns] = scaled
    return bool(torch.equal(slot, expected))
