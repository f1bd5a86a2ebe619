"""Reads back and refills the experts of a mixture in a vLLM model, by their names one by one.

vLLM stacks a layer's experts in `w13_weight` [experts, 2 x width, hidden] (gates, then ups) and `w2_weight` [experts,
hidden, width]. On a CPU both are packed for its grouped products: a permutation of each expert's values, found here by
packing their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from services.generator.engines.vllm.worker.loaded_tensor import LoadedTensor

_DIGIT = 256
"""Integers up to it are exact in every floating-point type that weights have."""


def is_known(module: RoutedExperts) -> bool:
    """Whether this worker has all experts of the layer, and they are not quantised."""
    return (
        isinstance(module.quant_method, UnquantizedFusedMoEMethod)
        and module.local_num_experts == module.global_num_experts
        and module.ckpt_up_proj_name is not None
    )


def can_refill(module: RoutedExperts) -> bool:
    """Whether `refill_experts` supports the layer: packed, on a CPU."""
    return is_known(module) and _packing(module) is not None and not hasattr(module, "w13_bias")


def held_by_experts(module_name: str, module: RoutedExperts) -> Iterator[LoadedTensor]:
    """Every expert's tensors by their names in the checkpoint; what has no known name there by its own."""
    known = ("w13_weight", "w2_weight") if is_known(module) else ()
    for name, parameter in module.named_parameters(recurse=False):
        if name not in known:
            yield LoadedTensor(name=f"{module_name}.{name}", values=parameter.data)
    if not known:
        return
    width, hidden = _sizes(module)
    first = module.moe_config.moe_parallel_config.tp_rank * width
    columns = first + torch.arange(width, device=module.w2_weight.device)
    num_rows = module.w13_weight.shape[1] // 2
    gate, up, down = _part_names(module)
    for index in range(module.local_num_experts):
        prefix = _expert_name(module_name, index)
        w13 = _unpacked(module, module.w13_weight.data[index])
        yield LoadedTensor(name=f"{prefix}.{gate}.weight", first_row=first, values=w13[:width, :hidden])
        yield LoadedTensor(
            name=f"{prefix}.{up}.weight", first_row=first, values=w13[num_rows : num_rows + width, :hidden]
        )
        w2 = _unpacked(module, module.w2_weight.data[index])
        yield LoadedTensor(name=f"{prefix}.{down}.weight", columns=columns, values=w2[:hidden, :width])


def refill_experts(module_name: str, module: RoutedExperts, read: Callable[[str], torch.Tensor]) -> None:
    """Writes the checkpoint's experts into a layer of a CPU worker that holds whole experts.

    Args:
        module_name: Of the layer.
        module: The layer; `can_refill`.
        read: A tensor of the checkpoint by its name.
    """
    packing = _packing(module)
    assert packing is not None
    width, hidden = _sizes(module)
    num_rows = module.w13_weight.shape[1] // 2
    gate, up, down = _part_names(module)
    for index in range(module.local_num_experts):
        prefix = _expert_name(module_name, index)
        # Padding is zero in both.
        w13 = torch.zeros_like(module.w13_weight.data[index])
        w13[:width, :hidden] = read(f"{prefix}.{gate}.weight")
        w13[num_rows : num_rows + width, :hidden] = read(f"{prefix}.{up}.weight")
        module.w13_weight.data[index] = cpu_prepack_moe_weight(w13[None], packing)[0]
        w2 = torch.zeros_like(module.w2_weight.data[index])
        w2[:hidden, :width] = read(f"{prefix}.{down}.weight")
        module.w2_weight.data[index] = cpu_prepack_moe_weight(w2[None], packing)[0]


def _sizes(module: RoutedExperts) -> tuple[int, int]:
    """Width of an expert in this worker, and of the model, without padding."""
    config: Any = module.moe_config
    return int(config.intermediate_size_per_partition_unpadded), int(config.hidden_dim_unpadded)


def _part_names(module: RoutedExperts) -> tuple[str, str, str]:
    return module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name


def _expert_name(module_name: str, index: int) -> str:
    return f"{module_name.removesuffix('.routed_experts')}.{index}"


def _packing(module: RoutedExperts) -> str | None:
    """The instruction set that the layer is packed for; None if it is not packed."""
    kernel = getattr(module.quant_method, "moe_kernel", None)
    experts: nn.Module | None = getattr(kernel, "fused_experts", None)
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        return None
    return str(experts.isa)


def _unpacked(module: RoutedExperts, values: torch.Tensor) -> torch.Tensor:
    packing = _packing(module)
    if packing is None:
        return values
    order = _packed_order(tuple(values.shape), values.dtype, packing)
    unpacked = torch.empty_like(values)
    unpacked.view(-1)[order] = values.reshape(-1)
    return unpacked


@lru_cache(maxsize=4)
def _packed_order(shape: tuple[int, int], dtype: torch.dtype, packing: str) -> torch.Tensor:
    """Where each value of a packed matrix came from; raises RuntimeError if packing is no permutation."""
    indices = torch.arange(shape[0] * shape[1]).view(1, *shape)
    order = torch.zeros_like(indices)
    scale = 1
    while scale < indices.numel():
        digits = (indices // scale) % _DIGIT
        order += scale * cpu_prepack_moe_weight(digits.to(dtype), packing).to(torch.int64)
        scale *= _DIGIT
    flat = order.view(-1)
    if not torch.equal(flat.sort().values, indices.view(-1)):
        raise RuntimeError(f"vLLM packs experts for {packing} by more than a permutation")
    return flat
