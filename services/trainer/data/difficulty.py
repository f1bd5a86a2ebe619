"""Lets rows rest that teach nothing: whose samples all pass, or all fail, at one visit after another."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from services.trainer.data_config import DifficultyConfig

MAX_ROWS = 10_000_000
"""Of all sources: 5 bytes each in memory; as text in a checkpoint, which holds 64 MiB, compressed, a byte or two."""


class DifficultyPool:
    """Which rows of one source rest, and until when.

    A row that begins to rest in an epoch is left out of the next `for_epochs`. Outcomes of a resting row, which come
    late, count for nothing: so the rows of an epoch, once it has begun, follow from this state at any time in it.
    """

    def __init__(self, num_rows: int, config: DifficultyConfig) -> None:
        self._config = config
        self._streaks = np.zeros(num_rows, dtype=np.int8)
        """Visits in a row at which all samples passed, or minus those at which all failed."""
        self._rests_until = np.zeros(num_rows, dtype=np.uint32)
        """The last epoch in which the row rests; nothing rests in epoch 0."""

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self._streaks.nbytes + self._rests_until.nbytes

    def is_awake(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of each row, whether it is visited in this epoch: bool[num_rows]."""
        # Rows whose rest began in this epoch have `epoch + for_epochs`.
        until = self._rests_until
        return (until < max(1, epoch)) | (until >= epoch + self._config.for_epochs)

    def num_resting(self, epoch: int) -> int:
        """Rows that rest now, or from the next epoch on."""
        return int(np.count_nonzero(self._rests_until >= max(1, epoch)))

    def wake_all(self) -> None:
        """End all rests."""
        self._rests_until[:] = 0

    def note(self, row: int, pass_rate: float, *, epoch: int) -> None:
        """Count a visit. `epoch` is the one that the source is in, not that of the visit."""
        if self._rests_until[row] >= max(1, epoch):
            return
        sign = {0.0: -1, 1.0: 1}.get(pass_rate, 0)
        if sign == 0 or max(sign, 0) not in self._config.rest_at:
            self._streaks[row] = 0
            return
        streak = int(self._streaks[row])
        streak = sign + (streak if streak * sign > 0 else 0)
        if abs(streak) >= self._config.after:
            streak, self._rests_until[row] = 0, epoch + self._config.for_epochs
        self._streaks[row] = streak

    def dump(self) -> str:
        """The state as text."""
        data = self._streaks.tobytes() + self._rests_until.astype("<u4").tobytes()
        return base64.b64encode(zlib.compress(data, 1)).decode()

    def load(self, text: str) -> None:
        """Take the state that `dump` gave; raises ValueError if it is of another number of rows."""
        num_rows = self._streaks.size
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(base64.b64decode(text, validate=True), 5 * num_rows + 1)
        except zlib.error as error:
            raise ValueError(f"its difficulty pool cannot be read: {error}") from error
        if len(data) != 5 * num_rows:
            raise ValueError(f"its difficulty pool is not that of {num_rows} rows")
        self._streaks = np.frombuffer(data, np.int8, num_rows).copy()
        self._rests_until = np.frombuffer(data, "<u4", num_rows, offset=num_rows).astype(np.uint32)
