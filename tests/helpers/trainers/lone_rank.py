"""One process of a trainer whose others do not exist: enough to read, to shard and to count, not to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from services.trainer.distributed.expert_mesh import ExpertMesh
from services.trainer.distributed.process_group import RankGroup
from services.trainer.distributed.stages import Stage
from services.trainer.model.ranks import Ranks


class LoneRank(Ranks):
    """Shards as a process of a group does; what it gathers from the others is arbitrary."""

    shard = RankGroup.shard
    _expert_mesh = None

    def __init__(self, rank: int, num_ranks: int, *, expert_size: int = 1) -> None:
        self.rank, self.num_ranks, self.num_shards = rank, num_ranks, num_ranks
        # A name of its own: PyTorch keeps what it computed for equal meshes, which elsewhere have one rank a process.
        name = f"rank_{rank}_of_{dist.get_world_size()}"
        self._mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(name,))
        if expert_size > 1:
            num_shards = num_ranks // expert_size
            shards, experts = names = (f"expert_shard_{rank}", f"expert_{rank}")
            divided = self._mesh._unflatten(0, (num_shards, expert_size), names)
            self._expert_mesh = ExpertMesh(divided[experts], shards=divided[shards], num_shards=num_shards)

    def cut(self, model: PreTrainedModel, layers_per_stage: Sequence[int] | None, *, has_output: bool = True) -> None:
        if self._expert_mesh is not None:
            self._expert_mesh.divide(model)

    def total(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LoneStage(LoneRank):
    """One process of a stage, which receives arbitrary hidden states and gradients."""

    cut = RankGroup.cut
    rank_of_stage = RankGroup.rank_of_stage
    _split_layers = None

    def __init__(self, rank: int, num_ranks: int, *, num_stages: int) -> None:
        super().__init__(rank, num_ranks // num_stages)
        self.num_ranks, self.num_stages = num_ranks, num_stages
        self.stage_index = rank // self.num_shards
        self.stage = Stage(index=self.stage_index, num_stages=num_stages)

    def agree(self, is_so: bool) -> bool:
        """Whatever it computed from what is arbitrary."""
        return True


@contextmanager
def one_of(rank: int, num_ranks: int, *, expert_size: int = 1) -> Iterator[LoneRank]:
    with lone_group(rank, num_ranks):
        yield LoneRank(rank, num_ranks, expert_size=expert_size)


@contextmanager
def lone_group(rank: int, num_ranks: int) -> Iterator[None]:
    """The group alone."""
    # As `RankGroup` does: PyTorch would take the meshes of earlier groups for this one's, and look for their groups.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
