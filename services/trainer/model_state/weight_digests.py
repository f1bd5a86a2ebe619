"""Digests of a file that several processes wrote, each by one of them, from the file.

Whole tensors and chunks are divided by their bytes, so a digest does not depend on who holds which rows.
"""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.model.digests import TensorPlace, digests_at, safetensors_places, tensor_info
from penstock.model.hashing import Algorithm
from penstock.transfer.chunks import chunk_spans, chunks_at
from penstock.v1 import weights_pb2
from services.trainer.model_state.agreement import Writers
from services.trainer.publishing.written_weights import WrittenWeights

_DIGEST_BYTES = 32


def digest_together(path: Path, *, writers: Writers) -> WrittenWeights:
    """The digests of a complete file, in all processes, all of which call this.

    Those that do not see it know its chunks alone.

    Raises:
        OSError: A process cannot read it, or was lost.
    """
    tensors = tensors_together(path, writers=writers)
    own_size = writers.do(path, lambda: path.stat().st_size if writers.is_beside else 0)
    size = writers.number_of_first(own_size, path)
    spans, table = writers.do(path, lambda: _own_chunks(path, chunk_spans(size), writers))
    chunks = [
        weights_pb2.ChunkInfo(offset=offset, size_bytes=size_bytes, blake3=digest)
        for (offset, size_bytes), digest in zip(spans, _digests(table, path, writers), strict=True)
    ]
    return WrittenWeights(path=path, tensors=tensors, chunks=tuple(chunks))


def tensors_together(
    path: Path, *, writers: Writers, algorithm: Algorithm = "blake3"
) -> tuple[weights_pb2.TensorInfo, ...]:
    """The digests of a file's tensors, in all processes, all of which call this.

    Raises:
        OSError: A process cannot read it, or was lost.
    """
    places = writers.do(path, lambda: safetensors_places(path) if writers.is_beside else ())
    num_places = writers.number_of_first(len(places), path)
    table = writers.do(path, lambda: _own_tensors(path, places, num_places, writers, algorithm))
    digests = _digests(table, path, writers)
    return tuple(
        tensor_info(name=place.name, dtype=place.dtype, shape=place.shape, digest=digest, algorithm=algorithm)
        for place, digest in zip(places, digests, strict=writers.is_beside)
    )


def _own_tensors(
    path: Path, places: tuple[TensorPlace, ...], num_places: int, writers: Writers, algorithm: Algorithm
) -> torch.Tensor:
    """This process' digests: a row for each tensor of the file, zeros where others do it."""
    table = torch.zeros(num_places, _DIGEST_BYTES, dtype=torch.uint8)
    if not writers.is_beside:
        return table
    owners = _owners(places, writers.ranks_beside)
    mine = [number for number, owner in enumerate(owners) if owner == writers.rank]
    for number, info in zip(mine, digests_at(path, [places[number] for number in mine], algorithm), strict=True):
        table[number] = _row(info.blake3 or info.sha256)
    return table


def _own_chunks(
    path: Path, spans: list[tuple[int, int]], writers: Writers
) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """The file's chunks, and this process' digests."""
    table = torch.zeros(len(spans), _DIGEST_BYTES, dtype=torch.uint8)
    if not writers.is_beside:
        return spans, table
    ranks = writers.ranks_beside
    own = ranks.index(writers.rank)
    first, last = (len(spans) * number // len(ranks) for number in (own, own + 1))
    for number, chunk in enumerate(chunks_at(path, spans[first:last]), first):
        table[number] = _row(chunk.blake3)
    return spans, table


def _digests(table: torch.Tensor, path: Path, writers: Writers) -> list[str]:
    """All processes' digests."""
    return [bytes(row).hex() for row in writers.added_up(table, path).tolist()]


def _owners(places: tuple[TensorPlace, ...], ranks: tuple[int, ...]) -> list[int]:
    """Which rank digests each tensor: largest first, each to the rank with the fewest bytes so far."""
    owners, loads = [0] * len(places), [0] * len(ranks)
    for number in sorted(range(len(places)), key=lambda number: places[number].begin - places[number].end):
        least = loads.index(min(loads))
        owners[number] = ranks[least]
        loads[least] += places[number].end - places[number].begin
    return owners


def _row(digest: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
