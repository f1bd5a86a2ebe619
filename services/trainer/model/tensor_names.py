"""Dictionaries of tensors whose names are paths."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from services.trainer.model.backend import CheckpointMismatchError


def below(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Those whose path begins with `name`, by the rest of it."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def placed(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The same with `name` before each path."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def check_layout(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, where: str) -> None:
    """Refuses tensors of other names, shapes or element types. Raises CheckpointMismatchError."""
    odd = sorted(found.keys() ^ wanted.keys())
    odd += [
        name
        for name in found.keys() & wanted.keys()
        if found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype
    ]
    if odd:
        raise CheckpointMismatchError(f"{where}: tensors missing, unknown or of another layout, for example {odd[0]}")
