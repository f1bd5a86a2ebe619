"""Watches the processes of a run from outside: peaks of memory, bytes over TCP connections between them.

Peaks and counts are read again and again, since a process takes its own with it when it ends; what happens within the
last PERIOD_S of a process, or of a connection, is not seen.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.resident import own_mb, peak_mb

PERIOD_S = 0.5
_TEXTS = (
    ("services.trainer.worker_process", "trainer-1"),
    ("VLLM::EngineCore", "engine"),
    ("redis-server", "redis"),
    ("console run", "console"),
)
"""What command lines say, and the names of the processes; services state theirs after --name."""
_SERVICE = re.compile(r"console serve .*--name (\S+)")
_PROCESS, _SENT = re.compile(r"pid=(\d+)"), re.compile(r"bytes_sent:(\d+)")
_SOCKETS = ("ss", "-tinpH", "state", "established")


class Observer:
    """Peaks and traffic of a process and all that it starts.

    Args:
        pid: Of the process.
    """

    def __init__(self, pid: int) -> None:
        self.peaks_mb: dict[str, float] = {}
        """By process."""
        self.own_mb: dict[str, float] = {}
        """The same without pages of mapped files, of the moments at which it was read."""
        self._pid = pid
        self._sent: dict[tuple[str, str], int] = {}
        """Bytes by connection: the addresses of sender and receiver."""
        self._owners: dict[str, str] = {}
        """Processes by the addresses of their connections."""

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            names = self._read_peaks()
            if shutil.which(_SOCKETS[0]):
                await self._read_connections(names)
            await asyncio.sleep(PERIOD_S)

    @property
    def links(self) -> dict[str, int]:
        """Bytes sent from each process to each other one."""
        found: dict[str, int] = defaultdict(int)
        for (sender, receiver), num_bytes in self._sent.items():
            if sender in self._owners and receiver in self._owners:
                found[f"{self._owners[sender]} to {self._owners[receiver]}"] += num_bytes
        return dict(sorted(found.items()))

    def _read_peaks(self) -> dict[int, str]:
        names = {}
        for pid in _family(self._pid):
            try:
                name = _name(pid)
                if name is not None:
                    self.peaks_mb[name] = max(self.peaks_mb.get(name, 0.0), peak_mb(pid))
                    self.own_mb[name] = max(self.own_mb.get(name, 0.0), own_mb(pid))
                    names[pid] = name
            except (OSError, RuntimeError):
                # It has just ended.
                continue
        return names

    async def _read_connections(self, names: dict[int, str]) -> None:
        process = await asyncio.create_subprocess_exec(*_SOCKETS, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        # Two lines for each: addresses and process, then counts.
        lines = output.decode().splitlines()
        for addresses, counts in zip(lines[::2], lines[1::2], strict=False):
            owner, sent = _PROCESS.search(addresses), _SENT.search(counts)
            if owner is None or int(owner[1]) not in names:
                continue
            _, _, here, there, *_ = addresses.split()
            self._owners[here] = names[int(owner[1])]
            if sent is not None:
                self._sent[here, there] = max(self._sent.get((here, there), 0), int(sent[1]))


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        lists = [path.read_text(encoding="ascii") for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in {int(word) for text in lists for word in text.split()}:
        yield from _family(child)


def _name(pid: int) -> str | None:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if service := _SERVICE.search(words):
        return service[1]
    return next((name for text, name in _TEXTS if text in words), None)
