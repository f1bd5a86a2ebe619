"""Training a LoRA adapter with PEFT: Hu et al., LoRA, arXiv 2106.09685.

- The base never changes and is identified by the digest of its files, which published and saved adapters name.
- The adapter's tensors are published and saved under PEFT's own names, so PEFT and vLLM read them as they are.
- Dropout, if configured, is on only while gradients are computed: the log-probs of the loss are then noisier than those
  of the published policy.
- The reference policy is the base with the adapter switched off; it takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from penstock.model.adapter_layout import model_digest
from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.config import LoraSection
from services.trainer.model.backend import CheckpointMismatchError, UnsupportedModelError
from services.trainer.model.trained_model import TrainedModel

ADAPTER_FILE = "adapter_model.safetensors"
_BASE_DIGEST = "base_digest"
_OWN_NAME = "default"


class LoraModel(TrainedModel):
    """A model of which only the adapter is trained.

    Args:
        base: The model, just loaded.
        path: The folder it was loaded from.
        config: Rank, scale, layers, dropout.

    Raises:
        UnsupportedModelError: It has no such layers, or PEFT cannot adapt them.
        OSError: Its files cannot be read.
    """

    weights_file = ADAPTER_FILE

    def __init__(self, base: PreTrainedModel, *, path: Path, config: LoraSection) -> None:
        self._base_digest = model_digest(path)
        self.adapter = AdapterInfo(
            base_digest=self._base_digest,
            rank=config.rank,
            alpha=config.alpha,
            target_modules=sorted(config.target_modules),
        )
        settings = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(config.target_modules),
            task_type="CAUSAL_LM",
        )
        try:
            super().__init__(get_peft_model(base, settings, adapter_name=_OWN_NAME))
        except ValueError as error:
            raise UnsupportedModelError(f"lora.target_modules: {error}") from error
        self.network.eval()
        self._dropouts = [module for name, module in self.network.named_modules() if ".lora_dropout." in name]

    def state_tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, by the names of PEFT."""
        return {
            name.replace(f".{_OWN_NAME}.", "."): parameter.detach()
            for name, parameter in self.network.named_parameters()
            if parameter.requires_grad
        }

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
        with self.network.disable_adapter():
            yield self.network

    @property
    def weights_metadata(self) -> dict[str, str]:
        """Names the base."""
        return {**super().weights_metadata, _BASE_DIGEST: self._base_digest}

    def complete(self, directory: Path) -> None:
        """Completes a directory that `PeftModel.from_pretrained` reads."""
        self.network.peft_config[_OWN_NAME].save_pretrained(directory)

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
