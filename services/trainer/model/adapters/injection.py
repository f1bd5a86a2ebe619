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
from transformers import PreTrainedModel

from services.trainer.model.adapters.parts import own_part, placed
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.parameter_views import local_part
from services.trainer.model.precision import MASTER
from services.trainer.model.ranks import Ranks
from services.trainer.run_sections import LoraSection

OWN_NAME = "default"
"""PEFT's name of the one adapter."""


class Injection:
    """The factors of one adapter.

    Args:
        config: Rank, scale, layers, dropout.
        ranks: The processes that share the base.
        device: Of this process, on which weights are packed into 4 bits.
    """

    def __init__(self, config: LoraSection, ranks: Ranks, device: torch.device) -> None:
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
        self._is_packed = config.base == "nf4"
        self._packed: dict[str, Any] = {}
        """The layers of 4 bits, by their names in the files."""
        self._ranks = ranks
        self._device = device
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
        if self._is_packed:
            self._pack(base)
        yield base
        for name, layer in self.layers.items():
            self._replace(name, layer.base_layer)
        for name, layer in self._packed.items():
            if layer.packed.is_meta:
                self._replace(name, layer.reader())

    def fill(self) -> None:
        """Show the factors again, with this process' part of their first values: A is random, B zero.

        A's numbers follow from PyTorch's seed and the layer's name, so they are the same however the base is divided.
        """
        for name, layer in self._packed.items():
            layer.finish_reading()
            self._replace(name, layer)
        for name, layer in self.layers.items():
            self._replace(name, layer)
            a, b = factor_of(layer, "A"), factor_of(layer, "B")
            first = {a: _drawn(name, tuple(a.weight.shape)), b: torch.zeros(b.weight.shape, dtype=MASTER)}
            for factor, whole in first.items():
                factor.weight = nn.Parameter(placed(factor.weight, own_part(whole, factor.weight)))
        assert self._base is not None
        for name, parameter in self._base.named_parameters():
            # Weights that were read into places without memory are to be trained, as far as `transformers` knows.
            parameter.requires_grad_(".lora_" in name)

    def _pack(self, base: PreTrainedModel) -> None:
        """Replace all linear layers but the output layer by layers of 4 bits."""
        # Imported here: it loads libraries, and most bases have 16 bits.
        from services.trainer.model.adapters.nf4 import BLOCK, Nf4Linear

        found = {name: each for name, each in base.named_modules() if type(each) is nn.Linear and ".lora_" not in name}
        for name, linear in found.items():
            if linear is base.get_output_embeddings():
                continue
            if (num_inputs := local_part(linear.weight).shape[1]) % BLOCK:
                is_split = num_inputs < linear.in_features
                raise UnsupportedModelError(
                    f"lora.base: nf4 packs blocks of {BLOCK} weights, and {name} has {num_inputs} inputs"
                    + (
                        " in each process; set it to auto, or trainer.parallel.tensor to 1"
                        if is_split
                        else "; set it to auto"
                    )
                )
            layer = Nf4Linear(linear, self._device)
            self._replace(name, layer)
            self._packed[name.removesuffix(".base_layer")] = layer

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
