"""Wraps the trained weights: all of a model, or a LoRA adapter over frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import SAFE_WEIGHTS_NAME

from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.model.backend import UnsupportedModelError


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Trade compute for memory: each layer's activations are recomputed in the backward pass.

    Layers do so in training mode only. The mode is set on the layers alone, not on their modules: dropout stays off.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class TrainedModel:
    """The model that computes log-probs, and its tensors that are trained, published and saved: here all of them.

    Args:
        network: The module to call; in evaluation mode.
        reference: The same as it was before training, if it is needed.
        published_dtype: Element type in which its tensors are published; None for their own.
    """

    weights_file = SAFE_WEIGHTS_NAME
    """Name of the file, in a directory that `from_pretrained` reads, that holds what is published."""

    def __init__(
        self, network: Any, *, reference: PreTrainedModel | None = None, published_dtype: torch.dtype | None = None
    ) -> None:
        self.network = network
        self.published_dtype = published_dtype
        self._reference = reference.requires_grad_(False) if reference is not None else None

    @property
    def adapter(self) -> AdapterInfo | None:
        """How the published tensors are applied; None if they are all weights."""
        return None

    @property
    def networks(self) -> tuple[Any, ...]:
        """The modules that compute log-probs, each called on its own."""
        return (self.network,) if self._reference is None else (self.network, self._reference)

    def parameters(self) -> dict[str, Tensor]:
        """What the optimiser changes, by the names under which checkpoints keep its state."""
        return {name: parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad}

    def moments_name(self, name: str) -> str:
        """The name under which checkpoints keep the optimiser's state of a trained tensor."""
        return name

    def elsewhere(self, absent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The trained tensors that other stages hold, without memory, given the model's that they hold."""
        return dict(absent)

    def state_tensors(self) -> dict[str, Tensor]:
        """The trained tensors by name, tied ones once; live views."""
        return distinct_tensors(self.network)

    def reference_tensors(self) -> dict[str, Tensor]:
        """The reference's weights by name, tied ones once; live views, empty if they cannot change."""
        return {} if self._reference is None else distinct_tensors(self._reference)

    @contextmanager
    def training(self) -> Iterator[None]:
        """The context in which gradients are computed. Changes nothing here: dropout stays off."""
        yield

    @contextmanager
    def as_reference(self) -> Iterator[Any]:
        """The module with the weights of the reference; raises ValueError if they were not kept."""
        if self._reference is None:
            raise ValueError("no reference model was kept")
        yield self._reference

    def refresh_reference(self) -> None:
        """Makes the current weights those of `as_reference`; raises UnsupportedModelError if that is impossible."""
        if self._reference is None:
            raise UnsupportedModelError("no reference model was kept that could be refreshed")
        self._reference.load_state_dict(self.network.state_dict())

    @property
    def weights_metadata(self) -> dict[str, str]:
        """Metadata of that file."""
        return {"format": "pt"}

    def complete(self, directory: Path) -> None:
        """Writes what `from_pretrained` reads beside the published tensors, which are in their file; in any thread."""
        written = directory / self.weights_file
        state: dict[str, Tensor] = {}
        if self.network._weight_conversions or self.network._keys_to_ignore_on_save:
            # The file that from_pretrained reads has other tensors then: made from this one, which is only mapped.
            mapped = written.rename(directory / "mapped")
            state = load_file(mapped)
            mapped.unlink()
        self.network.save_pretrained(directory, state_dict=state)
        # The configuration names the type of the trained weights; loading these files must use their own.
        config = deepcopy(self.network.config)
        config.dtype = self.published_dtype
        config.save_pretrained(directory)

    def check_saved(self, directory: Path) -> None:
        """Raises CheckpointMismatchError if what was saved there does not belong to this model.

        Accepts anything here: names and shapes are checked on loading.
        """


def distinct_tensors(network: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors by name, tied ones once; live views."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors
