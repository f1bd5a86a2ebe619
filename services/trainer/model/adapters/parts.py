"""Puts numbers in the place of a tensor that was sharded while it had no memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def own_part(whole: Tensor, empty: Tensor) -> Tensor:
    """This process' part of a tensor that is to be in an empty one's place."""
    if not isinstance(empty, DTensor):
        return whole
    shape, offsets = compute_local_shape_and_global_offset(empty.shape, empty.device_mesh, empty.placements)
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))]


def placed(empty: Tensor, part: Tensor) -> Tensor:
    """A tensor sharded like an empty one, of which this process holds that part."""
    if not isinstance(empty, DTensor):
        return part
    made = torch.empty_like(empty.detach(), device=part.device)
    made.to_local().copy_(part)
    return made
