"""The rows of one source in a seeded, resumable order: pass after pass, each in its own order when shuffled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.trainer.data.difficulty import DifficultyPool


class RowOrder:
    """Takes one row after another, each once in an epoch unless it rests.

    The order depends on seed, epoch and what rests in it: a resumed run needs `epoch`, `offset` and the pool.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: Sequence[int],
        shuffle: bool,
        pool: DifficultyPool | None = None,
        on_all_resting: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_all_resting` is called when every row would rest, and all are woken instead."""
        self.epoch = 0
        self.offset = 0
        """Rows taken in this epoch."""
        self.pool = pool
        self._num_rows = num_rows
        self._seed = tuple(seed)
        self._shuffle = shuffle
        self._on_all_resting = on_all_resting
        self._rows: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._rows_epoch: int | None = None

    def take(self) -> tuple[int, int]:
        """The epoch and the row that come next."""
        if self.offset >= self._num_in(self.epoch):
            self.epoch += 1
            self.offset = 0
        row = self.row(self.epoch, self.offset)
        self.offset += 1
        return self.epoch, row

    def row(self, epoch: int, offset: int) -> int:
        """The row at a place of the current epoch, or of any epoch if none rests."""
        return offset if self._is_plain else int(self._of(epoch)[offset])

    @property
    def _is_plain(self) -> bool:
        """Whether rows come as they are: then there may be more than fit in memory."""
        return not self._shuffle and self.pool is None

    def _num_in(self, epoch: int) -> int:
        return self._num_rows if self._is_plain else self._of(epoch).size

    def _of(self, epoch: int) -> npt.NDArray[np.int32]:
        if epoch != self._rows_epoch:
            rows = np.arange(self._num_rows, dtype=np.int32)
            if self._shuffle:
                rows = np.random.default_rng([*self._seed, epoch]).permutation(rows)
            if self.pool is not None:
                rows = self._awake(rows, self.pool, epoch)
            self._rows, self._rows_epoch = rows, epoch
        return self._rows

    def _awake(self, rows: npt.NDArray[np.int32], pool: DifficultyPool, epoch: int) -> npt.NDArray[np.int32]:
        awake: npt.NDArray[np.int32] = rows[pool.is_awake(epoch)[rows]]
        if awake.size:
            return awake
        pool.wake_all()
        self._on_all_resting()
        return rows
