"""Writes one safetensors file from several processes: each writes the part of every tensor that it holds in its place.

A process' part of a tensor is a run of rows, or of columns within rows: runs of consecutive bytes in the file. Nothing
is gathered, except what processes hold that do not see the folder (`sent_parts`). The file is laid out as by
safetensors' own `save_file`, whatever the number of processes: the same tensors make the same bytes.

Promises:

- The file appears under its name once every process has written all of its part, or not at all.
- All processes learn if one of them fails.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.sent_parts import bring_parts

TEMPORARY_SUFFIX = ".tmp"
_HEADER_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The elements of a tensor that one process holds: runs of consecutive ones, at equal distances."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """In which they are written."""
    begin: int
    """Index of the first of them in the whole tensor."""
    stride: int
    """From the begin of a run to that of the next; of no meaning for a single one."""
    elements: Tensor
    """[runs, n], of any type, perhaps none."""

    def copied(self) -> Part:
        """The same in memory of its own, on the CPU and in the type in which they are written."""
        copy = torch.empty(self.elements.shape, dtype=self.dtype, pin_memory=self.elements.is_cuda)
        return replace(self, elements=copy.copy_(self.elements))

    def left_to_others(self) -> Part:
        """The same tensor, of which this process writes nothing."""
        return replace(self, begin=0, elements=self.elements.new_empty(0, 0))

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        num_bytes: int = math.prod(self.shape) * self.dtype.itemsize
        return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A safetensors file without its tensors' bytes."""

    header: bytes
    places: dict[str, int]
    """Where each tensor begins in the file."""
    num_bytes: int


def part_of(tensor: Tensor, *, dtype: torch.dtype | None, rank: int) -> Part:
    """This process' part of a tensor, a live view: of a sharded one its shard, of another all in process 0.

    Of several copies of a shard, the first process has it and the others have nothing to write.

    Args:
        tensor: As the model holds it.
        dtype: In which floating-point numbers are written; None for their own.
        rank: Of this process.

    Raises:
        UnsupportedModelError: It is sharded by other dimensions than the first two.
    """
    written = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    shape = tuple(tensor.shape)
    row, begin, num_runs = math.prod(shape[1:]), 0, 1
    if isinstance(tensor, DTensor):
        held, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local()
        if local.numel() and (tuple(held[2:]) != shape[2:] or any(offsets[2:])):
            raise UnsupportedModelError(f"a tensor of {list(shape)} is sharded by other dimensions than the first two")
        begin = sum(offset * math.prod(shape[number + 1 :]) for number, offset in enumerate(offsets[:2]))
        # Columns of some rows: as many runs as rows.
        num_runs = held[0] if tuple(held[1:2]) != shape[1:2] else 1
        if not _is_first_copy(tensor):
            local = local.new_empty(0)
    else:
        local = tensor if rank == 0 else tensor.new_empty(0)
    elements = local.detach().reshape(num_runs, -1) if local.numel() else local.new_empty(0, 0)
    return Part(shape=shape, dtype=written, begin=begin, stride=row, elements=elements)


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this process is the first, in every direction, of those that hold the same shard."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return not any(
        index for index, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def write_together(
    path: Path, parts: Mapping[str, Part], *, writers: Writers, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the file; called by all processes, with the same names in all.

    Args:
        path: In a folder that those beside the first process see.
        parts: This process' parts, by the tensors' names.
        writers: The processes.
        metadata: Of the file.

    Raises:
        OSError: A disk refused, this process' or another's; or another does not see the folder, or was lost.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    layout = layout_of(parts, metadata)
    leads = writers.rank == 0
    try:
        writers.do(path, lambda: _make(temporary, layout) if leads else None)
        writers.do(path, lambda: _fill(temporary, parts, layout) if writers.is_beside else None)
        if writers.beside is not None:
            writers.do(path, lambda: bring_parts(temporary, parts, layout.places, writers))
        writers.do(path, lambda: os.replace(temporary, path) if leads else None)
    finally:
        if leads:
            temporary.unlink(missing_ok=True)


def write_alone(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write a file of this process' own, tensor by tensor: no copy of all of them is made; raises OSError."""
    parts = {name: part_of(tensor, dtype=None, rank=0) for name, tensor in tensors.items()}
    layout = layout_of(parts, metadata)
    _make(path, layout)
    _fill(path, parts, layout)


def layout_of(parts: Mapping[str, Part], metadata: Mapping[str, str] | None = None) -> Layout:
    """Where everything lies in the file: wide element types first, as safetensors has it, then by name."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends: dict[str, int] = {}
    begin = 0
    for name in sorted(parts, key=lambda name: (-parts[name].dtype.itemsize, name)):
        part, ends[name] = parts[name], begin
        end = begin + part.num_bytes
        header[name] = {"dtype": _DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    places = {name: len(head) + offset for name, offset in ends.items()}
    return Layout(header=head, places=places, num_bytes=len(head) + begin)


def _make(path: Path, layout: Layout) -> None:
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.num_bytes)


def _fill(path: Path, parts: Mapping[str, Part], layout: Layout) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, part in parts.items():
            # Here and not before: of a type that differs, one tensor at a time is converted.
            elements = part.elements.to(device="cpu", dtype=part.dtype)
            for number, run in enumerate(elements):
                first = part.begin + number * part.stride
                _write_at(descriptor, run, layout.places[name] + first * part.dtype.itemsize)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, elements: Tensor, offset: int) -> None:
    content = memoryview(elements.contiguous().view(torch.uint8).numpy()) if elements.numel() else memoryview(b"")
    while content:
        # At most 2 GB are written by one call.
        num_written = os.pwrite(descriptor, content, offset)
        content, offset = content[num_written:], offset + num_written
