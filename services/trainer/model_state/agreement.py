"""What the processes of a trainer tell each other while they write together in the background.

Numbers in tensors of a group of their own: nothing is unpickled, and no message of the training thread is waited for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from penstock.process.disk import FULL_ERRORS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FINE = 0
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writers:
    """The processes that write one file; all make the same calls in the same order. By default one process alone."""

    rank: int = 0
    """Of this process."""
    num_ranks: int = 1
    """Processes."""
    group: ProcessGroup | None = None
    """Connects them; None for one process."""
    beside: frozenset[int] | None = None
    """Those that see the file where the first one does; None if all do."""

    @property
    def is_beside(self) -> bool:
        """Whether this process sees the file."""
        return self.beside is None or self.rank in self.beside

    @property
    def ranks_beside(self) -> tuple[int, ...]:
        """Those that do, in order."""
        return tuple(range(self.num_ranks) if self.beside is None else sorted(self.beside))

    def number_of_first(self, number: int, path: Path) -> int:
        """The first process' number, in all of them; raises OSError if one of them was lost."""
        if self.beside is None:
            return number
        return int(self.added_up(torch.tensor(number if self.rank == 0 else 0), path))

    def do(self, path: Path, work: Callable[[], _Result]) -> _Result:
        """Do this process' share of something; returns its result once all have done theirs.

        Args:
            path: What is being written.
            work: The share.

        Raises:
            Exception: What `work` raised in this process; the others get an OSError.
            OSError: It failed in another process, and with its number; a full disk comes first.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # Whatever it is, the others wait to hear of it.
            failure = error
        self._settle(path, failure)
        return cast("_Result", result)

    def _settle(self, path: Path, failure: Exception | None) -> None:
        found = torch.full((self.num_ranks,), _FINE)
        if failure is not None:
            found[self.rank] = (failure.errno if isinstance(failure, OSError) else None) or errno.EIO
        numbers = self.added_up(found, path).tolist()
        if failure is not None:
            raise failure
        failed = {rank: number for rank, number in enumerate(numbers) if number != _FINE}
        if failed:
            rank = next((rank for rank, number in failed.items() if number in FULL_ERRORS), min(failed))
            raise OSError(failed[rank], f"{path}: process {rank}: {_described(failed[rank])}")

    def added_up(self, table: torch.Tensor, path: Path) -> torch.Tensor:
        """The sum of all processes' tables, integers of one shape; raises OSError if one of them was lost."""
        if self.group is not None:
            try:
                dist.all_reduce(table, group=self.group)
            except RuntimeError as error:
                raise OSError(errno.EIO, f"{path}: another process was lost while it was written: {error}") from error
        return table


def _described(number: int) -> str:
    if number == errno.ENOENT:
        return "does not see this file: all processes of a trainer need the same folder, on a disk that they share"
    return os.strerror(number)
