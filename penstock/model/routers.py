"""Finds the routers of a mixture of experts by its config.json. Light: no transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.model.model_folder import read_mapping
from penstock.wire.routes import Routes, RoutingShape

ROUTED_FAMILIES = ("olmoe", "qwen3_moe")
"""Values of `model_type` whose routers take the softmax of all logits, and then the largest."""


class NoRoutersError(ValueError):
    """The experts of this model cannot be recorded and replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a model."""

    shape: RoutingShape
    """The form of what they choose."""
    layers: tuple[int, ...]
    """The layers that have one."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """Their modules in the model of `transformers`, in the order of the layers."""
        return tuple(f"model.layers.{layer}.mlp.gate" for layer in self.layers)

    def joined(self, parts: Sequence[npt.NDArray[Any]]) -> Routes:
        """Consecutive rows of all layers, [rows, num_hidden_layers, k], without the layers that have no experts."""
        routes = [np.asarray(part)[:, list(self.layers)].astype(self.shape.dtype) for part in parts]
        return np.concatenate([self.shape.empty(), *routes])


def read_routers(folder: Path, *, field: str) -> Routers:
    """The routers of the model in a Hugging Face folder.

    Raises:
        NoRoutersError: It has none, or is of a family whose routers are not known; the message begins with `field`.
        OSError: config.json cannot be read.
    """
    config, where = read_mapping(folder / "config.json"), f"{field}: {folder}"
    family = config.get("model_type")
    if family not in ROUTED_FAMILIES:
        raise NoRoutersError(
            f"{where}: a model of type {family!r} has no routers that can be recorded and replayed; use a mixture of "
            f"experts of type {' or '.join(ROUTED_FAMILIES)}, or set {field} to false"
        )
    # `transformers` writes the one or the other name.
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    names = ("num_hidden_layers", experts, "num_experts_per_tok")
    num_layers, num_experts, num_chosen = (_number(config, name, where) for name in names)
    layers = tuple(layer for layer in range(num_layers) if _is_sparse(config, layer))
    if not layers:
        raise NoRoutersError(f"{where}: none of its layers has experts; set {field} to false")
    shape = RoutingShape(num_layers=len(layers), num_experts=num_experts, experts_per_token=num_chosen)
    return Routers(shape=shape, layers=layers)


def _is_sparse(config: Mapping[str, object], layer: int) -> bool:
    """Whether a layer has experts; all of them where the configuration makes no exception."""
    dense, period = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    is_exception = isinstance(dense, (list, tuple)) and layer in dense
    return not is_exception and isinstance(period, int) and period > 0 and (layer + 1) % period == 0


def _number(config: Mapping[str, object], name: str, where: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise NoRoutersError(f"{where}: {name} in config.json must be a positive integer, not {value!r:.100}")
    return value
