"""The processes of this machine, as /proc has them."""

from __future__ import annotations

from pathlib import Path


def processes() -> dict[int, tuple[str, int]]:
    """Who is there: process id to state and parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        found[int(path.parent.name)] = (fields[0], int(fields[1]))
    return found


def children_of(parent: int) -> set[int]:
    """Processes that it has started."""
    return {pid for pid, (_, ppid) in processes().items() if ppid == parent}


def is_running(pid: int) -> bool:
    """Whether it is there, and not as a zombie."""
    return processes().get(pid, ("Z", 0))[0] != "Z"
