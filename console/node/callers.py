"""Sees who is connected to servers of this machine, from the kernel's tables of TCP connections (Linux)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TABLES = ("tcp", "tcp6")
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"
"""Begins an IPv4 address in the table of IPv6."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class _Row(NamedTuple):
    local: str
    remote: str
    inode: str


def num_callers(ports: Collection[int], own_pids: Collection[int]) -> int:
    """Connections to listeners at these ports, but those of some processes of this machine; 0 without such tables.

    Args:
        ports: TCP ports of this machine.
        own_pids: Processes whose connections do not count.
    """
    rows = list(_rows())
    inodes = {inode for pid in own_pids for inode in _inodes(pid)}
    own = {row.local for row in rows if row.inode in inodes}
    return sum(int(row.local.rpartition(":")[2], 16) in ports and row.remote not in own for row in rows)


def _rows() -> Iterator[_Row]:
    for table in _TABLES:
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    local, remote = (field.removeprefix(_MAPPED) for field in fields[1:3])
                    yield _Row(local, remote, fields[9])


def _inodes(pid: int) -> Iterator[str]:
    """Of a process' sockets; none if it is gone."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # Closed meanwhile, perhaps.
            with suppress(OSError):
                if match := _SOCKET.fullmatch(str(link.readlink())):
                    yield match[1]
