"""What Penstock adds to a vLLM worker: taking weights from a file, and proving that they are what decodes.

Runs inside vLLM's engine process (`worker_extension_cls`). Promises:

- `penstock_attest` compares every number the model decodes with against the checkpoint, fused layers taken apart again.
  On CPU vLLM packs linear weights into oneDNN handles and drops the originals, so what a kernel holds is read by
  sending unit vectors through it: multiplying by 1 and adding zeros is exact, so the answer is the weight itself.
- Nothing is assumed about vLLM's own loading being right: the comparison walks the modules, not the loader's mapping.
- A parameter with no counterpart in the checkpoint, or the other way round, is a mismatch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from services.generator.vllm_adapters import install_adapter

PROBE_FLOPS = 500_000_000
"""Arithmetic one packed layer's probe may cost; a layer that needs more is sampled, by columns drawn anew each time."""
MIN_PROBE_COLUMNS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTensor:
    """Numbers the model decodes with, and which part of which checkpoint tensor they must equal."""

    name: str
    """Name in the Hugging Face state dict."""
    tied_name: str | None = None
    """The tensor that stands for it where the checkpoint leaves it out as tied."""
    first_row: int = 0
    """Where the held rows begin in the checkpoint's tensor."""
    columns: torch.Tensor | None = None
    """The checkpoint columns held; all where unset."""
    values: torch.Tensor
    """[rows] or [rows, columns]."""

    def matches(self, expected: torch.Tensor) -> bool:
        """Whether the values equal their part of the checkpoint's tensor, cast to the type that is held."""
        part = expected.narrow(0, self.first_row, self.values.shape[0]) if expected.dim() else expected
        if self.columns is not None:
            part = part[:, self.columns]
        return bool(torch.equal(part.to(device=self.values.device, dtype=self.values.dtype), self.values))


class PenstockWorkerExtension:
    """Methods mixed into vLLM's worker and called by name through `collective_rpc`."""

    model_runner: Any
    reload_weights: Any

    def penstock_install(self, path: str) -> list[str]:
        """Takes the weights of one safetensors file; returns the names of tensors that are not held afterwards."""
        model: nn.Module = self.model_runner.get_model()
        with torch.inference_mode(), _open_checkpoint([path]) as checkpoint:
            aliases = {held: tied for held, tied in _tied_heads(model).items() if held not in checkpoint}
            self.reload_weights(weights_iterator=_with_aliases(checkpoint, aliases))
        return self.penstock_attest([path])

    def penstock_install_adapter(self, folder: str, scaling: float) -> list[str]:
        """Takes the adapter of one PEFT folder; returns the names of tensors that are not held afterwards."""
        return install_adapter(self, folder, scaling)

    def penstock_attest(self, paths: Sequence[str]) -> list[str]:
        """The names of tensors in which the model and the checkpoint differ; none if it holds the checkpoint."""
        model: nn.Module = self.model_runner.get_model()
        mismatched: set[str] = set()
        seen: set[str] = set()
        with torch.inference_mode(), _open_checkpoint(paths) as checkpoint:
            for held in held_tensors(model):
                name = held.name if held.name in checkpoint else held.tied_name
                if name is None or name not in checkpoint or not held.matches(checkpoint[name].get_tensor(name)):
                    mismatched.add(held.name)
                else:
                    seen.add(name)
            return sorted(mismatched | (checkpoint.keys() - seen))


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names they have where no adapters are taken: vLLM wraps the layers that may be adapted."""
    for name, module in model.named_modules():
        yield name.removesuffix(".base_layer"), module


def held_tensors(model: nn.Module) -> Iterator[HeldTensor]:
    """Every parameter of the model as the checkpoint names it; fused layers yield one part for each original."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    tied = _tied_heads(model)
    for module_name, module in _named_modules(model):
        if isinstance(module, LinearBase):
            yield from _held_by_linear(module_name, module, packed)
        elif isinstance(module, VocabParallelEmbedding):
            yield _held_by_vocabulary(module_name, module, tied)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield HeldTensor(name=f"{module_name}.{name}", values=parameter.data)


def _held_by_linear(module_name: str, module: LinearBase, packed: dict[str, list[str]]) -> Iterator[HeldTensor]:
    parent, _, own_name = module_name.rpartition(".")
    parts = [f"{parent}.{part}" for part in packed.get(own_name, [own_name])]
    sizes: list[int] = list(module.output_partition_sizes)
    if len(sizes) != len(parts):
        parts, sizes = [module_name], [sum(sizes)]
    weight, columns = _weight_of_kernel(module)
    if isinstance(module, RowParallelLinear) and module.tp_size > 1:
        offset = module.tp_rank * module.input_size_per_partition
        columns = offset + (torch.arange(weight.shape[1], device=weight.device) if columns is None else columns)
    bias = getattr(module, "bias", None)
    begin = 0
    for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        first_row = _shard_index(module, index) * size
        rows = slice(begin, begin + size)
        yield HeldTensor(name=f"{part}.weight", first_row=first_row, columns=columns, values=weight[rows])
        if bias is not None:
            # Some CPU kernels keep the bias in float32, rounded to the layer's type before.
            values = bias.data[rows].to(module.params_dtype)
            yield HeldTensor(name=f"{part}.bias", first_row=first_row, values=values)
        begin += size


def _shard_index(module: LinearBase, part: int) -> int:
    if isinstance(module, QKVParallelLinear) and part > 0:
        return int(module.tp_rank // module.num_kv_head_replicas)
    return int(module.tp_rank) if isinstance(module, ColumnParallelLinear) else 0


def _held_by_vocabulary(module_name: str, module: VocabParallelEmbedding, tied: dict[str, str]) -> HeldTensor:
    name = f"{module_name}.weight"
    weight, columns = _weight_of_kernel(module) if isinstance(module, ParallelLMHead) else (module.weight.data, None)
    shard = module.shard_indices
    num_rows = shard.org_vocab_end_index - shard.org_vocab_start_index
    return HeldTensor(
        name=name,
        tied_name=tied.get(name),
        first_row=shard.org_vocab_start_index,
        columns=columns,
        values=weight[:num_rows],
    )


def _weight_of_kernel(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the layer multiplies by, [rows, columns], and which columns those are (all where None)."""
    if not hasattr(module, "cpu_linear"):
        return module.weight.data, None
    num_rows, num_columns = sum(_row_sizes(module)), _num_inputs(module)
    num_probed = max(MIN_PROBE_COLUMNS, PROBE_FLOPS // (2 * num_rows * num_columns))
    columns = None
    probe = torch.eye(num_columns, dtype=module.params_dtype) if num_probed >= num_columns else None
    if probe is None:
        # Fresh randomness of its own: the global generator belongs to the sampler.
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        columns = torch.randperm(num_columns, generator=generator)[:num_probed]
        probe = torch.zeros(num_probed, num_columns, dtype=module.params_dtype)
        probe[torch.arange(num_probed), columns] = 1.0
    return module.quant_method.apply(module, probe, None).t(), columns


def _row_sizes(module: Any) -> list[int]:
    if isinstance(module, VocabParallelEmbedding):
        return [module.num_embeddings_per_partition]
    return list(module.output_partition_sizes)


def _num_inputs(module: Any) -> int:
    if isinstance(module, VocabParallelEmbedding):
        return int(module.embedding_dim)
    return int(module.input_size_per_partition)


def _tied_heads(model: nn.Module) -> dict[str, str]:
    """Output heads that share an embedding's parameter: the head's weight name to the embedding's."""
    embeddings: dict[int, str] = {}
    heads: dict[str, str] = {}
    for name, module in _named_modules(model):
        if isinstance(module, ParallelLMHead):
            if id(module.weight) in embeddings:
                heads[f"{name}.weight"] = embeddings[id(module.weight)]
        elif isinstance(module, VocabParallelEmbedding):
            embeddings[id(module.weight)] = f"{name}.weight"
    return heads


@contextlib.contextmanager
def _open_checkpoint(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Tensor names to the open file that holds each; tensors are read when asked for."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _with_aliases(checkpoint: dict[str, Any], aliases: dict[str, str]) -> Iterable[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, and the tied heads it leaves out.

    Reloading unties what is tied, and packs an output head only when the head itself is loaded: without its alias the
    head goes on computing with the old weights, and no error says so.
    """
    for name, file in checkpoint.items():
        yield name, file.get_tensor(name)
    for name, tied_name in aliases.items():
        yield name, checkpoint[tied_name].get_tensor(tied_name)
