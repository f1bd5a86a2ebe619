"""Weights, gradients and optimiser in the machine's memory: the same steps, in a group of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from services.trainer.distributed.process_group import RankGroup
from tests.helpers.models.model_families import save_tiny
from tests.unit.trainer.distributed.test_rank_backend import build_backend, random_trajectories, train


def trained(model, *, offloads):
    """Whether each parameter is offloaded; gradients of a pass, weights after two steps."""
    ranks = RankGroup(dist.HashStore(), rank=0, num_ranks=1, local_rank=0, device="cpu")
    ranks.offloads = offloads
    try:
        backend = build_backend(model, ranks=ranks, keep_reference=True)
        groups = [
            module._get_fsdp_state()._fsdp_param_group
            for network in backend._trained.networks
            for module in network.modules()
            if isinstance(module, FSDPModule)
        ]
        are_offloaded = {each.offload_to_cpu for group in groups if group for each in group.fsdp_params}
        norms = [train(backend, random_trajectories(seed)).grad_norm for seed in range(2)]
        weights = {name: each.to_local().clone() for name, each in backend._trained.state_tensors().items()}
        backend.close()
    finally:
        dist.destroy_process_group()
    return are_offloaded, norms, weights


def test_offload_changes_no_step(tmp_path):
    model = save_tiny("qwen3", tmp_path)
    where, norms, weights = trained(model, offloads=False)
    where_offloaded, norms_offloaded, weights_offloaded = trained(model, offloads=True)
    assert (where, where_offloaded) == ({False}, {True})
    assert norms == norms_offloaded
    assert weights.keys() == weights_offloaded.keys()
    assert all(torch.equal(each, weights_offloaded[name]) for name, each in weights.items())
