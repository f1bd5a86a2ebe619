"""The sum over islands in real processes: exact, the same to the bit everywhere, whatever the cuts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.distributed import island_gradients
from services.trainer.distributed.island_gradients import Islands, buckets

SHAPES = [(7, 3), (1,), (5,), (16, 2, 2), (2, 9)]


def whole(island, tensor):
    return torch.rand(SHAPES[tensor], generator=torch.Generator().manual_seed(100 * island + tensor))


def one_process(rank, sizes, folder):
    store = dist.FileStore(str(folder / "store"), sum(sizes))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sum(sizes))
    island_gradients.BUCKET_BYTES = 64
    islands = Islands(sizes, rank=rank)
    groups = [dist.new_group(list(ranks)) for ranks in islands.ranks]
    mesh = DeviceMesh.from_group(groups[islands.own], "cpu")
    gradients = [distribute_tensor(whole(islands.own, tensor), mesh, [Shard(0)]) for tensor in range(len(SHAPES))]
    islands.sum_gradients(gradients, group=dist.group.WORLD)
    found = []
    for gradient in gradients:
        _, (start, *_) = compute_local_shape_and_global_offset(gradient.shape, mesh, gradient.placements)
        found.append((start, gradient.to_local().clone()))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2, 1)])
def test_every_process_holds_its_rows_of_the_sum(tmp_path, sizes):
    mp.start_processes(one_process, args=(sizes, tmp_path), nprocs=sum(sizes), start_method="fork")
    for rank in range(sum(sizes)):
        for tensor, (start, found) in enumerate(torch.load(tmp_path / f"{rank}.pt", weights_only=True)):
            total = whole(0, tensor)
            for island in range(1, len(sizes)):
                total += whole(island, tensor)
            assert found.equal(total[start : start + len(found)])


def test_slices_hold_all_rows_once_and_are_bounded(monkeypatch):
    monkeypatch.setattr(island_gradients, "BUCKET_BYTES", 64)
    found = list(buckets(SHAPES, itemsize=4))
    rows = [(each.tensor, row) for bucket in found for each in bucket for row in range(each.first, each.last)]
    assert rows == [(tensor, row) for tensor, shape in enumerate(SHAPES) for row in range(shape[0])]
    sizes = [4 * (r.last - r.first) * torch.Size(SHAPES[r.tensor][1:]).numel() for bucket in found for r in bucket]
    assert max(sizes) <= 64
    assert all(len({each.tensor for each in bucket}) == len(bucket) for bucket in found)
