"""The group of a process that trains with others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from services.trainer.distributed.process_group import RankGroup


def test_a_process_that_serves_one_run_after_the_other_computes_on_the_mesh_of_each():
    for _run in range(2):
        group = RankGroup(dist.HashStore(), rank=0, num_ranks=1, local_rank=0, device="cpu")
        try:
            parts = DTensor.from_local(torch.ones(2), group._mesh, [Shard(0)])
            assert (parts + parts).device_mesh is group._mesh
        finally:
            group.close()
