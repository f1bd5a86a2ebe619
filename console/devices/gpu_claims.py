"""Claims on GPUs among the runs of one user, from before a run's processes load until it ends.

A process that is just starting, or between two starts, holds no memory of its GPU yet: `nvidia-smi` shows it as free. A
claim is a locked file, whose lock ends with the process that holds it, however that ends. Other users see only what
`nvidia-smi` shows them.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MAX_HOLDER_BYTES = 256
_CLAIM_TRIES, _RETRY_S = 5, 0.01


class GpuClaims:
    """The claims of one process.

    Args:
        holder: Who claims, for other runs' messages.
        folder: Where claims are recorded; one folder per user if None.
    """

    def __init__(self, holder: str, *, folder: Path | None = None) -> None:
        self._holder = holder
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}-gpus"
        self._held: dict[str, int] = {}

    def claim(self, uuids: Iterable[str]) -> dict[str, str]:
        """Claim devices; returns those that another run holds, with its name. No-op without file locks."""
        others: dict[str, str] = {}
        for uuid in uuids:
            descriptor = None if uuid in self._held else self._open(uuid)
            if descriptor is None:
                continue
            if _lock(descriptor, fcntl.LOCK_EX, tries=_CLAIM_TRIES):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, self._holder.encode()[:_MAX_HOLDER_BYTES], 0)
                self._held[uuid] = descriptor
            else:
                others[uuid] = _holder(descriptor)
                os.close(descriptor)
        return others

    def others(self, uuids: Iterable[str]) -> dict[str, str]:
        """Devices that another run holds, with its name; claims nothing."""
        found: dict[str, str] = {}
        for uuid in uuids:
            descriptor = None if uuid in self._held else self._open(uuid)
            if descriptor is not None:
                if not _lock(descriptor, fcntl.LOCK_SH):
                    found[uuid] = _holder(descriptor)
                os.close(descriptor)
        return found

    def release(self) -> None:
        """Give up all claims. Idempotent."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _open(self, uuid: str) -> int | None:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.stat().st_uid == os.getuid():
                name = uuid.replace("/", "_")
                return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return None


def _lock(descriptor: int, kind: int, *, tries: int = 1) -> bool:
    for left in reversed(range(tries)):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError:
            # Possibly another run that only looks, which takes microseconds.
            time.sleep(_RETRY_S if left else 0.0)
        else:
            return True
    return False


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode(errors="replace") or "another run"
