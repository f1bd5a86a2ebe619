"""One process of a trainer whose others do not exist: enough to read, to shard and to count, not to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.trainer.distributed.process_group import RankGroup
from services.trainer.model.ranks import Ranks


class LoneRank(Ranks):
    """Shards as a process of a group does; what it gathers from the others is arbitrary."""

    shard = RankGroup.shard
    _expert_mesh = None

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.num_shards = rank, num_ranks, num_ranks
        # A name of its own: PyTorch keeps what it computed for equal meshes, which elsewhere have one rank a process.
        self._mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(f"rank_{rank}",))

    def total(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def one_of(rank: int, num_ranks: int) -> Iterator[LoneRank]:
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield LoneRank(rank, num_ranks)
    finally:
        dist.destroy_process_group()
