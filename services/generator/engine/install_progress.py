"""Signals progress of an installation of weights: a large model takes minutes, a hung engine for ever.

The installer signals every tensor. Workers in processes of their own touch a file beside the weights, which the
generator watches. Must import without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".installing"


class InstallSigns:
    """The engine's side: a value that changes while an installation makes progress."""

    def __init__(self) -> None:
        self._num_signs = 0
        self._file: Path | None = None
        self._is_active = False

    @property
    def current(self) -> int | None:
        """Changes with every signal; None while nothing is being installed."""
        if not self._is_active:
            return None
        with suppress(OSError):
            if self._file is not None:
                return self._num_signs + self._file.stat().st_mtime_ns
        return self._num_signs

    def give(self) -> None:
        """Signal that a tensor was installed, or a stage is done."""
        self._num_signs += 1

    @contextmanager
    def installing(self, weights: Path | None = None) -> Iterator[None]:
        """Inside, weights are installed: from this file by other processes, or by this one if it is None."""
        file = None if weights is None else signs_file(weights)
        if file is not None:
            file.touch()
        self._file, self._is_active = file, True
        self.give()
        try:
            yield
        finally:
            self._file, self._is_active = None, False
            if file is not None:
                file.unlink(missing_ok=True)


def signs_file(weights: Path) -> Path:
    """The file that workers touch to signal progress."""
    return weights.with_name(weights.name + _SUFFIX)


def give_sign(weights: str) -> None:
    """Signal from a worker that a tensor was installed or read back; a no-op if it is not watched."""
    with suppress(OSError):
        os.utime(signs_file(Path(weights)))
