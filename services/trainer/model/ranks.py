"""What a backend's part in one process needs of the others: `Ranks`, or `SingleRank` where there is one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks(Protocol):
    """All processes call `shard`, `whole`, `total`, `added_up` and `agree` in one order: each waits for the others."""

    @property
    def rank(self) -> int:
        """Rank of this process; 0 leads."""

    @property
    def num_ranks(self) -> int:
        """Processes, this one included."""

    @property
    def checkpoint_group(self) -> ProcessGroup | None:
        """For checkpoints, which are written beside training; None where there is one process."""

    def device(self, name: Literal["auto", "cpu", "cuda"]) -> torch.device:
        """Device of this process."""

    def shard(self, network: nn.Module) -> None:
        """Leave each process a part of every parameter; gradients are then summed over processes."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor in process 0, on the CPU where it had to be gathered; unspecified in the others."""

    def total(self, tensor: Tensor) -> Tensor:
        """A number about sharded tensors, added up in every process."""

    def added_up(self, count: int) -> int:
        """The sum of the processes' counts."""

    def agree(self, is_so: bool) -> bool:
        """Whether it is so in every process."""


class SingleRank:
    """One process."""

    rank = 0
    num_ranks = 1
    checkpoint_group = None

    def device(self, name: Literal["auto", "cpu", "cuda"]) -> torch.device:
        """The one named; for auto a GPU if there is one."""
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(name)

    def shard(self, network: nn.Module) -> None:
        """Does nothing."""

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """The number itself."""
        return tensor

    def added_up(self, count: int) -> int:
        """The count itself."""
        return count

    def agree(self, is_so: bool) -> bool:
        """What is so here is so everywhere."""
        return is_so
