"""Adds LoRA factors to a base before its weights are read, so that each process reads only its part of it.

    the base without memory --(`around`: factors added)--> sharded --(hidden)--> its weights read --> `fill`

While the base is read, adapted layers are hidden behind the layers that they wrap: the names are those of the files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from services.trainer.config import LoraSection
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.precision import MASTER
from services.trainer.model.ranks import Ranks

OWN_NAME = "default"
"""PEFT's name of the one adapter."""


class Injection:
    """The factors of one adapter.

    Args:
        config: Rank, scale, layers, dropout.
        ranks: The processes that share the base.
    """

    def __init__(self, config: LoraSection, ranks: Ranks) -> None:
        self._targets = config.target_modules
        self.settings = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(config.target_modules),
            task_type="CAUSAL_LM",
        )
        self.layers: dict[str, Any] = {}
        """The adapted layers by name."""
        self._ranks = ranks
        self._base: PreTrainedModel | None = None

    def around(self, base: PreTrainedModel) -> Iterator[nn.Module]:
        """The base with factors without memory, to be sharded before the next step, which hides them.

        Raises:
            UnsupportedModelError: It has no such layers, or PEFT cannot adapt them.
        """
        try:
            inject_adapter_in_model(self.settings, base, adapter_name=OWN_NAME, low_cpu_mem_usage=True)
        except ValueError as error:
            raise UnsupportedModelError(f"lora.target_modules: {error}") from error
        if self.settings.target_parameters:
            # PEFT found layers of these names in a mixture of experts; no engine takes an adapter of them.
            raise UnsupportedModelError(
                f"lora.target_modules: {', '.join(self._targets)} of {base.config.model_type} would adapt its experts, "
                "which is not supported; name layers of attention alone, for example q_proj"
            )
        self._base = base
        self.layers = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
        for layer in self.layers.values():
            for factor in ("A", "B"):
                factor_of(layer, factor).to(MASTER)
        self._ranks.split_adapter(base)
        yield base
        for name, layer in self.layers.items():
            self._replace(name, layer.base_layer)

    def fill(self) -> None:
        """Show the factors again, with this process' part of their first values: A is random, B zero.

        A's numbers follow from PyTorch's seed and the layer's name, so they are the same however the base is divided.
        """
        for name, layer in self.layers.items():
            self._replace(name, layer)
            a, b = factor_of(layer, "A"), factor_of(layer, "B")
            a.weight = _placed(a.weight, _drawn(name, tuple(a.weight.shape)))
            b.weight = _placed(b.weight, torch.zeros(b.weight.shape, dtype=MASTER))

    def _replace(self, name: str, layer: nn.Module) -> None:
        assert self._base is not None
        parent, _, last = name.rpartition(".")
        setattr(self._base.get_submodule(parent), last, layer)


def factor_of(layer: Any, factor: Literal["A", "B"]) -> nn.Linear:
    """An adapted layer's A or B."""
    return getattr(layer, f"lora_{factor}")[OWN_NAME]


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """As PEFT draws A: as PyTorch draws the weights of a linear layer."""
    digest = hashlib.sha256(f"{torch.initial_seed()}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    whole = torch.empty(shape, dtype=MASTER)
    return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


def _placed(empty: Tensor, whole: Tensor) -> nn.Parameter:
    """The part of a tensor that belongs in the place of an empty one."""
    if not isinstance(empty, DTensor):
        return nn.Parameter(whole)
    shape, offsets = compute_local_shape_and_global_offset(empty.shape, empty.device_mesh, empty.placements)
    part = torch.empty_like(empty.detach(), device=whole.device)
    own = tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))
    part.to_local().copy_(whole[own])
    return nn.Parameter(part)
