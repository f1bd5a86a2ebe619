"""Loads a version from a safetensors file into vLLM, within vLLM's own update session.

    start_weight_update -> update_weights({"path": ...}) -> finish_weight_update

vLLM's layerwise reload fits every model and keeps CUDA graphs valid. On a CPU its Python code costs as much as
several decoding steps of a tiny model, so plain models on one CPU worker are refilled module by module instead. In both
cases attestation afterwards checks the result.

On a CPU vLLM also packs the embedding, for products that an output head of its own computes; that copy is dropped, and
what loading freed is returned to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.memory.malloc import give_back
from services.generator.engine.install_progress import give_sign
from services.generator.engines.vllm.worker.checkpoint_files import StoredTensor, open_checkpoint
from services.generator.engines.vllm.worker.experts import can_refill, refill_experts
from services.generator.engines.vllm.worker.readback import linear_parts, tied_heads

KEPT_BYTES = 64 * 2**20
"""Of weights that are replaced one by one, after which what that freed is returned to the kernel."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped
    """No initialisation parameters."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped
    """Names one version's file."""

    path: str
    """Its safetensors file, readable by every worker."""


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]  # vLLM is untyped
    """Loads versions from files; a failed load leaves weights that attestation refuses."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tied: dict[str, str] = {}
        self._is_refilling = False

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to connect to; frees what the start left."""
        self._free_unused()

    def start_weight_update(self) -> None:
        """Sets up the layerwise reload, if it is used."""
        # Before a reload hides which tensors are tied.
        self._tied = tied_heads(self.model)
        self._is_refilling = self._can_refill()
        if not self._is_refilling:
            with torch.inference_mode():
                initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which on a CPU would fail to find an accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads the file. Raises KeyError or RuntimeError if it belongs to another model."""
        with torch.inference_mode(), open_checkpoint([update_info.path]) as files:
            checkpoint = Checkpoint(files, self._tied, on_read=lambda: give_sign(update_info.path))
            if self._is_refilling:
                refill(self.model, checkpoint)
            else:
                self.model.load_weights(checkpoint.items())

    def finish_weight_update(self) -> None:
        """Ends the layerwise reload, if it is used."""
        if not self._is_refilling:
            with torch.inference_mode():
                finalize_layerwise_reload(self.model, self.model_config)
        self._free_unused()

    def shutdown(self) -> None:
        """Nothing to release."""

    def _free_unused(self) -> None:
        if self.device.type == "cpu":
            drop_unused_copies(self.model)
            give_back()

    def _can_refill(self) -> bool:
        is_whole = self.parallel_config.world_size == 1
        return self.device.type == "cpu" and is_whole and not self.model_config.use_mla and is_plain(self.model)


class Checkpoint:
    """A checkpoint's tensors by name, including the tied ones that it omits.

    vLLM packs an output head only when the head itself is loaded: without its alias the head silently keeps computing
    with the old weights.
    """

    def __init__(self, files: dict[str, StoredTensor], tied: dict[str, str], *, on_read: Callable[[], None]) -> None:
        self._files = files
        self._on_read = on_read
        self._names = {name: name for name in files}
        self._names |= {held: name for held, name in tied.items() if held not in files and name in files}

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Raises KeyError."""
        self._on_read()
        return self._files[self._names[name]].read()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, each read on demand."""
        return ((name, self.read(name)) for name in self._names)


def is_plain(model: nn.Module) -> bool:
    """Whether `refill` supports all layers of the model: nothing quantised."""
    return all(_is_plain(module) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    if isinstance(module, RoutedExperts):
        return can_refill(module)
    if type(getattr(module, "quant_method", None)) not in (
        type(None),
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    ):
        return False
    # vLLM counts the method of a layer's experts as a module.
    prepared = (Attention, UnquantizedFusedMoEMethod)
    return isinstance(module, prepared) or not hasattr(module, "process_weights_after_loading")


def refill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Writes the checkpoint into one CPU worker's plain model, repacking packed layers."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    num_bytes = 0
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parts = [part for part, _ in linear_parts(name, module, packed)]
            num_bytes += _refill_linear(module, parts, checkpoint)
            if num_bytes > KEPT_BYTES:
                give_back()
                num_bytes = 0
        elif isinstance(module, VocabParallelEmbedding):
            tensor = checkpoint.read(f"{name}.weight")
            module.weight.data[: tensor.shape[0]].copy_(tensor)
            _pack(module)
        elif isinstance(module, RoutedExperts):
            refill_experts(name, module, checkpoint.read)
        else:
            for parameter_name, parameter in module.named_parameters(recurse=False):
                parameter.data.copy_(checkpoint.read(f"{name}.{parameter_name}"))


def drop_unused_copies(model: nn.Module) -> None:
    """Drops packed embeddings where an output head of its own multiplies, tied or not, or that of a later stage."""
    modules = list(model.modules())
    if not get_pp_group().is_last_rank or any(isinstance(module, ParallelLMHead) for module in modules):
        for module in modules:
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                vars(module).pop("cpu_linear", None)


def _refill_linear(module: Any, parts: list[str], checkpoint: Checkpoint) -> int:
    """Returns the weight's bytes."""
    weight = torch.cat([checkpoint.read(f"{part}.weight") for part in parts]).to(module.params_dtype)
    if module.weight.numel():
        module.weight.data.copy_(weight)
    else:
        # Dropped when the layer was packed, and dropped again below.
        module.weight = nn.Parameter(weight, requires_grad=False)
    if getattr(module, "bias", None) is not None:
        # Some CPU kernels keep the bias in float32, after rounding it to the layer's type.
        module.bias.data.copy_(torch.cat([checkpoint.read(f"{part}.bias") for part in parts]).to(module.params_dtype))
    _pack(module)
    return int(weight.nbytes)


def _pack(module: Any) -> None:
    if hasattr(module, "cpu_linear"):
        # Before the new one is made: a head's takes as much as its weight.
        module.cpu_linear = None
        module.quant_method.process_weights_after_loading(module)
