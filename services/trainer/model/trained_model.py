"""Wraps the trained weights: all of a model, or a LoRA adapter over frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.model.backend import UnsupportedModelError


class TrainedModel(Protocol):
    """The model that computes log-probs, and which of its tensors are trained, published and saved."""

    @property
    def network(self) -> Any:
        """The module to call; in evaluation mode."""

    @property
    def networks(self) -> tuple[Any, ...]:
        """All modules that hold weights, each called on its own."""

    @property
    def adapter(self) -> AdapterInfo | None:
        """How what is published is applied; None where it is all weights."""

    @property
    def published_dtype(self) -> torch.dtype | None:
        """Element type in which they are published; None for their own."""

    def state_tensors(self) -> dict[str, Tensor]:
        """The trained tensors by name, tied ones once; live views."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """While gradients are computed."""

    @contextmanager
    def as_reference(self) -> Iterator[Any]:
        """The module with the weights that training began with; raises ValueError where they were not kept."""

    def reference_tensors(self) -> dict[str, Tensor]:
        """The reference's weights by name, tied ones once; live views, empty where they cannot change."""

    def refresh_reference(self) -> None:
        """Makes the present weights those of `as_reference`; raises UnsupportedModelError where that cannot be."""

    def save(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """Writes what is published, whole and on the CPU, with the model's configuration; in any thread."""

    def check_saved(self, directory: Path) -> None:
        """Raises CheckpointMismatchError where what `save` wrote there belongs to something else."""


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Trade compute for memory: each layer's activations are computed again in the backward pass.

    Layers do so in training mode only. They alone are set to it, not what is inside them: dropout stays off.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class WholeModel:
    """Every weight is trained.

    Args:
        network: The model.
        reference: The same as it was before training, if it is needed.
        published_dtype: See `TrainedModel`.
    """

    adapter = None

    def __init__(
        self, network: PreTrainedModel, *, reference: PreTrainedModel | None, published_dtype: torch.dtype
    ) -> None:
        self.network = network
        self.published_dtype: torch.dtype | None = published_dtype
        self._reference = reference.requires_grad_(False) if reference is not None else None

    @property
    def networks(self) -> tuple[Any, ...]:
        """The policy, and the reference where it is kept."""
        return (self.network,) if self._reference is None else (self.network, self._reference)

    def state_tensors(self) -> dict[str, Tensor]:
        """All weights of the policy."""
        return _distinct_tensors(self.network)

    def reference_tensors(self) -> dict[str, Tensor]:
        """All weights of the reference."""
        return {} if self._reference is None else _distinct_tensors(self._reference)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Changes nothing: dropout stays off."""
        yield

    @contextmanager
    def as_reference(self) -> Iterator[Any]:
        """The second copy of the model."""
        if self._reference is None:
            raise ValueError("no reference model was kept")
        yield self._reference

    def refresh_reference(self) -> None:
        """Copies the policy's weights to the second copy."""
        if self._reference is None:
            raise UnsupportedModelError("no reference model was kept that could be refreshed")
        self._reference.load_state_dict(self.network.state_dict())

    def save(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """Writes a directory that `from_pretrained` reads."""
        self.network.save_pretrained(directory, state_dict=tensors)
        # It names the type of the weights that are trained; loading these must read their own.
        config = deepcopy(self.network.config)
        config.dtype = self.published_dtype
        config.save_pretrained(directory)

    def check_saved(self, directory: Path) -> None:
        """Accepts any: names and shapes, checked on loading, say enough."""


def _distinct_tensors(network: PreTrainedModel) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors
