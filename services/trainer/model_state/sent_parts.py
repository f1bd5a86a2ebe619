"""Brings the first process what others hold of a file that they do not see, in pieces of bounded size.

One process after the other sends, in the order of the tensors' names: where its parts lie, then their bytes. The first
process writes each piece to its place before it takes the next, so that its memory holds one. Numbers and bytes
in tensors of the writers' own group: nothing is unpickled.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from services.trainer.model_state.agreement import Writers

PIECE_BYTES = 32 * 1024**2
_BEGIN, _STRIDE, _NUM_RUNS, _RUN_BYTES = range(4)


class Held(Protocol):
    """What is read of a part (`weight_file.Part`)."""

    @property
    def begin(self) -> int:
        """Index of its first element in the whole tensor."""

    @property
    def stride(self) -> int:
        """From the begin of one of its runs to that of the next, in elements."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it is written."""

    @property
    def elements(self) -> Tensor:
        """[runs, n]."""


def bring_parts(path: Path, parts: Mapping[str, Held], places: Mapping[str, int], writers: Writers) -> None:
    """Called by all processes, with the same names in all; raises OSError.

    Args:
        path: The file, which exists in full size; only the first process writes to it.
        parts: This process' own.
        places: Where each tensor begins in the file.
        writers: The processes, of which some are not beside the first.
    """
    away = [rank for rank in range(writers.num_ranks) if rank not in writers.ranks_beside]
    failure: OSError | None = None
    try:
        if writers.rank in away:
            _send(parts, writers)
        elif writers.rank == 0:
            for rank in away:
                # Everything announced is received, even if the disk refused: the sender waits for that.
                failure = _receive(path, parts, places, rank, writers) or failure
    except RuntimeError as error:
        raise OSError(errno.EIO, f"{path}: another process was lost while it was written: {error}") from error
    if failure is not None:
        raise failure


def _send(parts: Mapping[str, Held], writers: Writers) -> None:
    names = sorted(parts)
    geometry = torch.zeros(len(names), 4, dtype=torch.int64)
    for row, name in enumerate(names):
        part, size = parts[name], parts[name].dtype.itemsize
        num_runs, length = part.elements.shape
        geometry[row] = torch.tensor([part.begin * size, part.stride * size, num_runs, length * size])
    dist.send(geometry, dst=0, group=writers.group)
    for name in names:
        part = parts[name]
        # Of a type that differs, one tensor at a time is converted.
        flat = part.elements.to(device="cpu", dtype=part.dtype).contiguous().view(-1)
        for piece in flat.view(torch.uint8).split(PIECE_BYTES) if flat.numel() else ():
            dist.send(piece.contiguous(), dst=0, group=writers.group)


def _receive(
    path: Path, parts: Mapping[str, Held], places: Mapping[str, int], rank: int, writers: Writers
) -> OSError | None:
    """Take all parts of one process; returns why they could not be written."""
    names = sorted(parts)
    geometry = torch.zeros(len(names), 4, dtype=torch.int64)
    dist.recv(geometry, src=rank, group=writers.group)
    failure: OSError | None = None
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, row in zip(names, geometry.tolist(), strict=True):
            num_bytes = row[_NUM_RUNS] * row[_RUN_BYTES]
            for begin in range(0, num_bytes, PIECE_BYTES):
                piece = torch.empty(min(PIECE_BYTES, num_bytes - begin), dtype=torch.uint8)
                dist.recv(piece, src=rank, group=writers.group)
                try:
                    if failure is None:
                        _write(descriptor, memoryview(piece.numpy()), begin, row, places[name])
                except OSError as error:
                    failure = error
    finally:
        os.close(descriptor)
    return failure


def _write(descriptor: int, piece: memoryview, begin: int, row: list[int], place: int) -> None:
    """Write consecutive bytes of a part, from its byte `begin` on, each run of them where it belongs."""
    while piece:
        run, inside = divmod(begin, row[_RUN_BYTES])
        within = piece[: row[_RUN_BYTES] - inside]
        num_written = os.pwrite(descriptor, within, place + row[_BEGIN] + run * row[_STRIDE] + inside)
        piece, begin = piece[num_written:], begin + num_written
