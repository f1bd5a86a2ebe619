"""Reads back what a vLLM model decodes with, by the checkpoint's tensor names; fused layers are split again.

On CPU vLLM packs linear weights into oneDNN handles and drops the originals, so a kernel's weights are read by sending
unit vectors through it: multiplying by 1 and adding zeros is exact, so the result is the weight itself. vLLM's own
loading is not assumed to be correct: this walks the modules, not the loader's mapping.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from services.generator.engines.vllm.worker.experts import held_by_experts
from services.generator.engines.vllm.worker.loaded_tensor import LoadedTensor

PROBE_FLOPS = 500_000_000
"""Arithmetic that probing one packed layer may cost; costlier layers are sampled, by new random columns each time."""
MIN_PROBE_COLUMNS = 16


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by their names in a model without adapters: vLLM wraps the layers that may be adapted."""
    for name, module in model.named_modules():
        yield name.removesuffix(".base_layer"), module


def held_tensors(model: nn.Module) -> Iterator[LoadedTensor]:
    """Every parameter of the model by its name in the checkpoint; fused layers yield one part per original."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    tied = tied_heads(model)
    for module_name, module in named_modules(model):
        if isinstance(module, LinearBase):
            yield from _held_by_linear(module_name, module, packed)
        elif isinstance(module, VocabParallelEmbedding):
            yield _held_by_vocabulary(module_name, module, tied)
        elif isinstance(module, RoutedExperts):
            yield from held_by_experts(module_name, module)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield LoadedTensor(name=f"{module_name}.{name}", values=parameter.data)


def linear_parts(module_name: str, module: LinearBase, packed: dict[str, list[str]]) -> list[tuple[str, int]]:
    """The checkpoint's layers that are fused in this one, with their numbers of rows, in order."""
    parent, _, own_name = module_name.rpartition(".")
    parts = [f"{parent}.{part}" for part in packed.get(own_name, [own_name])]
    sizes: list[int] = list(module.output_partition_sizes)
    if len(sizes) != len(parts):
        return [(module_name, sum(sizes))]
    return list(zip(parts, sizes, strict=True))


def _held_by_linear(module_name: str, module: LinearBase, packed: dict[str, list[str]]) -> Iterator[LoadedTensor]:
    weight, columns = _weight_of_kernel(module)
    if isinstance(module, RowParallelLinear) and module.tp_size > 1:
        offset = module.tp_rank * module.input_size_per_partition
        columns = offset + (torch.arange(weight.shape[1], device=weight.device) if columns is None else columns)
    bias = getattr(module, "bias", None)
    begin = 0
    for index, (part, size) in enumerate(linear_parts(module_name, module, packed)):
        first_row = _shard_index(module, index) * size
        rows = slice(begin, begin + size)
        yield LoadedTensor(name=f"{part}.weight", first_row=first_row, columns=columns, values=weight[rows])
        if bias is not None:
            # Some CPU kernels keep the bias in float32, after rounding it to the layer's type.
            values = bias.data[rows].to(module.params_dtype)
            yield LoadedTensor(name=f"{part}.bias", first_row=first_row, values=values)
        begin += size


def _shard_index(module: LinearBase, part: int) -> int:
    if isinstance(module, QKVParallelLinear) and part > 0:
        return int(module.tp_rank // module.num_kv_head_replicas)
    return int(module.tp_rank) if isinstance(module, ColumnParallelLinear) else 0


def _held_by_vocabulary(module_name: str, module: VocabParallelEmbedding, tied: dict[str, str]) -> LoadedTensor:
    name = f"{module_name}.weight"
    weight, columns = _weight_of_kernel(module) if isinstance(module, ParallelLMHead) else (module.weight.data, None)
    shard = module.shard_indices
    num_rows = shard.org_vocab_end_index - shard.org_vocab_start_index
    return LoadedTensor(
        name=name,
        tied_name=tied.get(name),
        first_row=shard.org_vocab_start_index,
        columns=columns,
        values=weight[:num_rows],
    )


def _weight_of_kernel(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights that the layer multiplies by, [rows, columns], and their column indices (None for all)."""
    if not hasattr(module, "cpu_linear"):
        return module.weight.data, None
    num_rows, num_columns = sum(_row_sizes(module)), _num_inputs(module)
    num_probed = max(MIN_PROBE_COLUMNS, PROBE_FLOPS // (2 * num_rows * num_columns))
    columns = None
    probe = torch.eye(num_columns, dtype=module.params_dtype) if num_probed >= num_columns else None
    if probe is None:
        # A generator of its own: the global one belongs to the sampler.
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
    # A layer that is never split has one size.
    return int(getattr(module, "input_size_per_partition", module.input_size))


def tied_heads(model: nn.Module) -> dict[str, str]:
    """Output heads that share an embedding's parameter, as a map of the head's weight name to the embedding's."""
    embeddings: dict[int, str] = {}
    heads: dict[str, str] = {}
    for name, module in named_modules(model):
        if isinstance(module, ParallelLMHead):
            if id(module.weight) in embeddings:
                heads[f"{name}.weight"] = embeddings[id(module.weight)]
        elif isinstance(module, VocabParallelEmbedding):
            embeddings[id(module.weight)] = f"{name}.weight"
    return heads
