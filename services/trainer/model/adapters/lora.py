"""Training a LoRA adapter with PEFT: Hu et al., LoRA, arXiv 2106.09685.

- The base never changes and is identified by the digest of its files, which published and saved adapters name.
- The adapter's tensors are published and saved under PEFT's own names, so PEFT and vLLM read them as they are.
- Dropout, if configured, is on only while gradients are computed: the log-probs of the loss are then noisier than those
  of the published policy.
- The reference policy is the base with the adapter switched off; it takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from penstock.model.adapter_layout import adapter_layout, factor_name
from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.model.adapters.injection import OWN_NAME, Injection, factor_of
from services.trainer.model.backend import CheckpointMismatchError
from services.trainer.model.precision import MASTER
from services.trainer.model.trained_model import TrainedModel
from services.trainer.run_sections import LoraSection

ADAPTER_FILE = "adapter_model.safetensors"
FACTORS: tuple[Literal["A", "B"], ...] = ("A", "B")
_BASE_DIGEST = "base_digest"


class LoraModel(TrainedModel):
    """A model of which only the adapter is trained.

    Args:
        base: The model, with the adapter's factors.
        injection: The factors.
        path: The folder from which the base was read.
        config: Rank, scale, layers, dropout.
        base_digest: Of that folder's weights.
    """

    weights_file = ADAPTER_FILE

    def __init__(
        self, base: PreTrainedModel, *, injection: Injection, path: Path, config: LoraSection, base_digest: str
    ) -> None:
        super().__init__(base)
        self._settings = injection.settings
        self._settings.base_model_name_or_path = str(path)
        self._layers = injection.layers
        self._base_digest = base_digest
        self._info = AdapterInfo(
            base_digest=base_digest,
            rank=config.rank,
            alpha=config.alpha,
            target_modules=sorted(config.target_modules),
        )
        self._dropouts = [layer.lora_dropout[OWN_NAME] for layer in self._layers.values()]

    @property
    def adapter(self) -> AdapterInfo:
        """Rank, scale, layers, base."""
        return self._info

    def parameters(self) -> dict[str, Tensor]:
        """The factors."""
        return {
            self.moments_name(factor_name(name, factor)): factor_of(layer, factor).weight
            for name, layer in self._layers.items()
            for factor in FACTORS
        }

    def moments_name(self, name: str) -> str:
        """The name within PEFT's model, which has that of the adapter in it."""
        factor, _, last = name.rpartition(".")
        return f"{factor}.{OWN_NAME}.{last}"

    def state_tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, by the names of PEFT."""
        return {
            factor_name(name, factor): factor_of(layer, factor).weight.detach()
            for name, layer in self._layers.items()
            for factor in FACTORS
        }

    def elsewhere(self, absent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The factors of the layers that other stages hold."""
        layout = adapter_layout({name: tuple(tensor.shape) for name, tensor in absent.items()}, self._info)
        return {name: torch.empty(shape, dtype=MASTER, device="meta") for name, shape in layout.items()}

    @contextmanager
    def training(self) -> Iterator[None]:
        """Turns the adapter's dropout on within the context."""
        self._switch_dropout(is_on=True)
        try:
            yield
        finally:
            self._switch_dropout(is_on=False)

    @contextmanager
    def as_reference(self) -> Iterator[Any]:
        """The same network with the adapter off."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
            # PEFT freezes them, too, and FSDP would keep that of weights that it gathers meanwhile.
            for factor in FACTORS:
                factor_of(layer, factor).weight.requires_grad_(True)
        try:
            yield self.network
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @property
    def weights_metadata(self) -> dict[str, str]:
        """Names the base."""
        return {**super().weights_metadata, _BASE_DIGEST: self._base_digest}

    def complete(self, directory: Path) -> None:
        """Completes a directory that `PeftModel.from_pretrained` reads."""
        self._settings.save_pretrained(directory)

    def check_saved(self, directory: Path) -> None:
        """Refuses an adapter over another base."""
        stated = saved_base_digest(directory)
        if stated != self._base_digest:
            raise CheckpointMismatchError(
                f"{directory}: an adapter over base weights with digest {stated}, model.path holds {self._base_digest}"
            )

    def _switch_dropout(self, *, is_on: bool) -> None:
        for module in self._dropouts:
            module.train(is_on)


def saved_base_digest(directory: Path) -> str | None:
    """Digest of the base that a saved adapter applies to; None if the directory holds no adapter or names no base."""
    path = directory / ADAPTER_FILE
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
    return metadata.get(_BASE_DIGEST)
