"""Sums gradients between islands: groups of processes that each shard a whole copy of the model over their own mesh.

Islands of unlike sizes cut a tensor's rows at unlike places. So each process exchanges with those of the other islands
the rows that both hold, once for an optimiser step.

Invariants:
- All processes go through the tensors in one order, in slices of at most BUCKET_BYTES.
- Parts are added in the order of the islands, so that all copies stay equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 32 << 20
"""Of gradients that are exchanged at a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of rows of one of the gradients."""

    tensor: int
    first: int
    last: int
    """Not included."""

    def held_by(self, shard: range) -> Rows:
        """Those of them that are in a shard; perhaps none."""
        first = max(self.first, shard.start)
        return Rows(self.tensor, first, max(first, min(self.last, shard.stop)))


class Islands:
    """The islands of a trainer, seen from one of its processes.

    Args:
        sizes: Number of processes of each; their ranks follow each other.
        rank: Of this process.
    """

    def __init__(self, sizes: Sequence[int], *, rank: int) -> None:
        starts = [sum(sizes[:island]) for island in range(len(sizes))]
        self.ranks = tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
        self.rank = rank
        self.own = next(island for island, ranks in enumerate(self.ranks) if rank in ranks)

    def sum_gradients(self, gradients: Sequence[Tensor], *, group: dist.ProcessGroup) -> None:
        """Leave every gradient the sum over islands; called by all processes.

        Args:
            gradients: Sharded by rows over this process' island, of the same shapes and in the same order everywhere.
            group: Of all processes.
        """
        shapes = [tuple(gradient.shape) for gradient in gradients]
        # Whole shapes are those of sharded tensors alone.
        local = [each.to_local() for each in gradients if isinstance(each, DTensor)]
        for bucket in buckets(shapes, itemsize=max((each.element_size() for each in local), default=4)):
            self._sum(bucket, shapes, local, group)

    def _sum(
        self,
        bucket: Sequence[Rows],
        shapes: Sequence[tuple[int, ...]],
        local: Sequence[Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        own = [rows.held_by(self._shard(shapes[rows.tensor][0], self.rank)) for rows in bucket]
        shared: dict[int, list[Rows]] = {}
        for peer in (peer for island, ranks in enumerate(self.ranks) if island != self.own for peer in ranks):
            common = [rows.held_by(self._shard(shapes[rows.tensor][0], peer)) for rows in own]
            if common := [rows for rows in common if rows.first < rows.last]:
                shared[peer] = common
        received: dict[int, Tensor] = {}
        calls = []
        for peer, common in shared.items():
            sent = torch.cat([self._view(rows, shapes, local).flatten() for rows in common])
            received[peer] = torch.empty_like(sent)
            calls.append(dist.P2POp(dist.isend, sent, peer, group))
            calls.append(dist.P2POp(dist.irecv, received[peer], peer, group))
        for call in dist.batch_isend_irecv(calls) if calls else ():
            call.wait()
        total: Tensor | None = None
        flat = [self._view(rows, shapes, local).flatten() for rows in own]
        starts = {rows.tensor: (rows.first, start) for rows, start in zip(own, _starts(flat), strict=True)}
        mine = torch.cat(flat)
        for island, ranks in enumerate(self.ranks):
            part = mine
            if island != self.own:
                part = torch.empty_like(mine)
                for peer in ranks:
                    self._place(part, received.get(peer), shared.get(peer, ()), starts, shapes)
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        for rows, summed in zip(own, total.split([each.numel() for each in flat]), strict=True):
            view = self._view(rows, shapes, local)
            view.copy_(summed.view_as(view))

    def _place(
        self,
        part: Tensor,
        received: Tensor | None,
        common: Sequence[Rows],
        starts: dict[int, tuple[int, int]],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        """Write what a peer sent to where this process' rows lie in `part`."""
        begin = 0
        for rows in common:
            assert received is not None
            first, start = starts[rows.tensor]
            width = math.prod(shapes[rows.tensor][1:])
            num_elements = (rows.last - rows.first) * width
            place = start + (rows.first - first) * width
            part[place : place + num_elements] = received[begin : begin + num_elements]
            begin += num_elements

    def _view(self, rows: Rows, shapes: Sequence[tuple[int, ...]], local: Sequence[Tensor]) -> Tensor:
        begin = self._shard(shapes[rows.tensor][0], self.rank).start
        return local[rows.tensor][rows.first - begin : rows.last - begin]

    def _shard(self, num_rows: int, rank: int) -> range:
        """The rows that a process holds, as FSDP2 cuts them."""
        ranks = next(ranks for ranks in self.ranks if rank in ranks)
        size = math.ceil(num_rows / len(ranks))
        first = min(ranks.index(rank) * size, num_rows)
        return range(first, min(first + size, num_rows))


def buckets(shapes: Sequence[tuple[int, ...]], *, itemsize: int) -> Iterator[list[Rows]]:
    """All rows, in order, in slices of at most BUCKET_BYTES; of a tensor at least one row, and one run in a slice."""
    bucket: list[Rows] = []
    room = BUCKET_BYTES
    for tensor, (num_rows, *rest) in enumerate(shapes):
        row_bytes = max(1, math.prod(rest) * itemsize)
        first = 0
        while first < num_rows:
            if bucket and room < row_bytes:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            last = min(num_rows, first + max(1, room // row_bytes))
            bucket.append(Rows(tensor, first, last))
            room -= (last - first) * row_bytes
            first = last
    if bucket:
        yield bucket


def _starts(flat: Sequence[Tensor]) -> list[int]:
    """Where each begins in the concatenation of all."""
    return list(accumulate((each.numel() for each in flat[:-1]), initial=0))
