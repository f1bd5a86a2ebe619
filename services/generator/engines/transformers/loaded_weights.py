"""Loads weights or an adapter from a file into a transformers model, and reads them back.

An adapter is kept beside the base (PEFT), not merged into it: low-precision sums would swallow an optimiser step's
small changes, and an update moves only the adapter's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.model.adapter_layout import scaling
from penstock.v1.weights_pb2 import AdapterInfo

_OWN_NAME = "default"
"""PEFT's name for a model's only adapter; it is part of the model's tensor names, but not of those in files."""


def install_weights(model: Any, path: Path, *, on_tensor: Callable[[], None] = lambda: None) -> list[str]:
    """Copies a safetensors file into the model in place; returns the names of tensors that do not match afterwards.

    `on_tensor` is called for every tensor, once when it is copied and once when it is read back.
    """
    return _copy_in(path, model.state_dict(), on_tensor)


def install_adapter(
    model: Any, path: Path, adapter: AdapterInfo, *, on_tensor: Callable[[], None] = lambda: None
) -> list[str]:
    """Loads a safetensors file's adapter beside the base; as `install_weights`.

    Raises:
        ValueError: PEFT cannot adapt these layers.
    """
    _make_room(model, adapter)
    return _copy_in(path, _adapter_tensors(model), on_tensor)


def _copy_in(path: Path, held: dict[str, torch.Tensor], on_tensor: Callable[[], None]) -> list[str]:
    mismatched: set[str] = set()
    written: set[int] = set()
    with torch.inference_mode():
        for name, tensor in _tensors(path):
            held[name].copy_(tensor)
            written.add(held[name].data_ptr())
            on_tensor()
        for name, tensor in _tensors(path):
            on_tensor()
            if not torch.equal(held[name], tensor.to(held[name])):
                mismatched.add(name)
    # A tied tensor is written under the name that it shares memory with.
    return sorted(mismatched | {name for name, tensor in held.items() if tensor.data_ptr() not in written})


def mismatched_base(model: Any, model_path: Path) -> list[str]:
    """The names of tensors in which a model without an adapter differs from its folder."""
    # Imported here: transformers takes seconds to import.
    from transformers.core_model_loading import revert_weight_conversion

    # Files hold experts one by one, the model all of a layer in one tensor.
    held = revert_weight_conversion(model, model.state_dict())
    return sorted(
        name
        for path in model_path.glob("*.safetensors")
        for name, tensor in _tensors(path)
        if name not in held or not torch.equal(held[name], tensor.to(held[name]))
    )


def _make_room(model: Any, adapter: AdapterInfo) -> None:
    """Adapts the layers with this rank and scale, replacing any adapter."""
    # Imported here: PEFT takes a second to import, and most runs have no adapter.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.target_modules))
        inject_adapter_in_model(config, model, adapter_name=_OWN_NAME)
        model.requires_grad_(False).eval()
        return
    for layer in layers:
        if layer.r[_OWN_NAME] != adapter.rank:
            raise ValueError(
                f"the engine holds an adapter of rank {layer.r[_OWN_NAME]}, not {adapter.rank}; restart it"
            )
        layer.scaling[_OWN_NAME] = scaling(adapter)


def _adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's parameters by their names in files."""
    return {
        f"base_model.model.{name}".replace(f".{_OWN_NAME}.", "."): parameter.data
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name)
