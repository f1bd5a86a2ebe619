"""Linear layers of a base in 4 bits: NF4 with double quantisation, for the base of an adapter only.

64 consecutive weights of a row share a scale, and a row's scales, in 8 bits, share an offset and a step. So each row is
packed by itself: a base has the same numbers however its rows are divided over processes. bitsandbytes, in which the
kernels of the paper's authors live, packs and unpacks the weights; its own packing of scales crosses rows. Of a layer
that is split by its inputs, each process packs whole rows and keeps its own blocks.

While it is read, a layer's place is taken by a `Reader`, which packs the weight as soon as it is there.

Source: Dettmers et al., QLoRA (arXiv 2305.14314), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import linear

from penstock.memory.malloc import leave_mapped_file
from services.trainer.model.adapters.parts import placed
from services.trainer.model.parameter_views import compute_with, local_part

BLOCK = 64
"""Weights that share a scale."""
ROW_BYTES = 8
"""Of a row, besides codes and scales: the offset and the step of its scales, float32."""
_STEPS = 127
_PACKED_AT_A_TIME = 1 << 18
"""Weights."""


class Nf4Linear(nn.Module):  # type: ignore[misc]  # torch declares no types for it
    """A linear layer whose weight is packed: uint8[outputs, inputs / 2 + inputs / BLOCK + ROW_BYTES]; frozen.

    Args:
        layer: With its weight, or without memory for it, perhaps split; each part's number of inputs is a multiple of
            BLOCK.
        device: On which its weight is packed: a GPU is many times faster.
    """

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        num_rows, self._num_own_inputs = local_part(weight).shape
        if weight.is_meta:
            width = self._num_own_inputs // 2 + self._num_own_inputs // BLOCK + ROW_BYTES
            packed = torch.empty(num_rows, width, dtype=torch.uint8, device="meta")
        else:
            rows = weight.full_tensor() if _columns_of(weight)[1] > 1 else local_part(weight)
            packed = own_columns(pack(rows.to(device)), self.in_features, *_columns_of(weight))
        if isinstance(weight, DTensor):
            packed = DTensor.from_local(packed, weight.device_mesh, weight.placements, run_check=False)
            compute_with(self, local_part)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", layer.bias)
        self.dtype, self.device = layer.weight.dtype, device
        # In a list: it is no module of its own.
        self._reader: list[Reader] = []

    def reader(self) -> Reader:
        """What is to be in its place while it is read, once it was sharded."""
        self._reader = [Reader(self)]
        return self._reader[0]

    def finish_reading(self) -> None:
        """Take over what its reader has read besides."""
        for reader in self._reader:
            self.bias = reader.bias
        self._reader = []

    def forward(self, inputs: Tensor) -> Tensor:
        """As a linear layer's, in the type of autocast."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        product: Tensor = _Product.apply(inputs.to(dtype), self.packed, self._num_own_inputs)
        return product if self.bias is None else product + self.bias.to(dtype)


class Reader(nn.Module):  # type: ignore[misc]
    """Stands for a layer that is read: its weight is packed when it is set, and never kept.

    Args:
        layer: The layer, perhaps sharded by rows.
    """

    def __init__(self, layer: Nf4Linear) -> None:
        super().__init__()
        # In a list: names are those of the files.
        self._layer = [layer]
        packed, shape = layer.packed, torch.Size((layer.out_features, layer.in_features))
        weight = torch.empty(shape, dtype=layer.dtype, device="meta")
        if isinstance(packed, DTensor):
            rows = weight[: len(packed.to_local())]
            mesh, stride = packed.device_mesh, weight.stride()
            placements = [Replicate() if each.is_shard(1) else each for each in packed.placements]
            weight = DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", layer.bias)

    def __setattr__(self, name: str, value: Any) -> None:
        """Pack the weight; keep everything else."""
        if name != "weight" or value.is_meta:
            super().__setattr__(name, value)
            return
        rows = local_part(value.detach())
        (layer,) = self._layer
        packed = own_columns(pack(rows.to(layer.device)), layer.in_features, *_columns_of(layer.packed))
        layer.packed = nn.Parameter(placed(layer.packed, packed), requires_grad=False)
        if rows.device.type == "cpu" and not rows.untyped_storage().resizable():
            # A view of the file.
            leave_mapped_file(rows.data_ptr(), rows.nbytes)
        # The model moves to its device before the layer is back.
        del self._parameters[name]


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """inputs @ weight.T; the weight is unpacked again for the backward pass, and freed after each."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, num_inputs: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.num_inputs = num_inputs
        return linear(inputs, unpack(packed, num_inputs, dtype=inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, ctx.num_inputs, dtype=gradient.dtype), None, None


def pack(weight: Tensor) -> Tensor:
    """Rows of a weight, each by itself: uint8[rows, inputs / 2 + inputs / BLOCK + ROW_BYTES]."""
    num_rows, num_inputs = weight.shape
    packed = weight.new_empty(num_rows, num_inputs // 2 + num_inputs // BLOCK + ROW_BYTES, dtype=torch.uint8)
    # A CPU compares each weight with all sixteen codes at once.
    num_at_a_time = max(1, _PACKED_AT_A_TIME // num_inputs)
    for rows, place in zip(weight.split(num_at_a_time), packed.split(num_at_a_time), strict=True):
        if len(rows):
            place.copy_(_packed_rows(rows))
    return packed


def _packed_rows(weight: Tensor) -> Tensor:
    num_rows = len(weight)
    codes, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    scales = state.absmax.view(num_rows, -1)
    offsets = scales.mean(dim=1, keepdim=True)
    # A row of equal scales has no steps.
    steps = ((scales - offsets).abs().amax(dim=1, keepdim=True) / _STEPS).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = ((scales - offsets) / steps).round().to(torch.int8)
    parts = (codes.view(num_rows, -1), numbers.view(torch.uint8), torch.cat((offsets, steps), dim=1).view(torch.uint8))
    return torch.cat(parts, dim=1)


def own_columns(packed: Tensor, num_inputs: int, part: int, num_parts: int) -> Tensor:
    """Of packed whole rows one of several equal parts, as its own rows: their scales are still those of whole rows."""
    codes, numbers, row = packed.split((num_inputs // 2, num_inputs // BLOCK, ROW_BYTES), dim=1)
    return torch.cat((codes.chunk(num_parts, 1)[part], numbers.chunk(num_parts, 1)[part], row), dim=1)


def _columns_of(tensor: Tensor) -> tuple[int, int]:
    """Which part of the columns this process has, and of how many."""
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard(1):
                return tensor.device_mesh.get_local_rank(dim), tensor.device_mesh.size(dim)
    return 0, 1


def unpack(packed: Tensor, num_inputs: int, *, dtype: torch.dtype) -> Tensor:
    """The weight that `pack` packed: [rows, inputs]."""
    codes, numbers, row = packed.split((num_inputs // 2, num_inputs // BLOCK, ROW_BYTES), dim=1)
    offsets, steps = row.contiguous().view(torch.float32).split(1, dim=1)
    scales = (offsets + steps * numbers.view(torch.int8)).flatten()
    state = QuantState(
        scales, shape=torch.Size((len(packed), num_inputs)), dtype=dtype, blocksize=BLOCK, quant_type="nf4"
    )
    weight: Tensor = dequantize_4bit(codes.reshape(-1, 1), state)
    return weight
