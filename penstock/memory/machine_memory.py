"""How much memory of its machine a process can have, and can still have: what the kernel and its cgroups say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What all processes of this machine, or of this container, can still have together; caches count as free."""
    free = _stated(proc / "meminfo", "MemAvailable:")
    if free is None:
        # Not Linux: all that the machine has.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((free * 1024, *_left(proc, cgroups)))


def total_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What all processes of this machine, or of this container, have together, free or not."""
    total = _stated(proc / "meminfo", "MemTotal:")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if total is None else total * 1024
    return min((machine, *(group.most for group in _groups(proc, cgroups))))


@dataclass(frozen=True, slots=True)
class _Group:
    """A limited group."""

    folder: Path
    most: int
    usage: str
    """File with the bytes in use."""
    cached: tuple[str, ...]
    """Lines of memory.stat with bytes that can be had."""


def _groups(proc: Path, cgroups: Path) -> Iterator[_Group]:
    """Each limited group, from the one of this process upwards."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root, limit, usage, cached = cgroups, "memory.max", "memory.current", ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = ("total_inactive_file", "total_active_file")
        else:
            continue
        own = root / name.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            if (most := _number(folder / limit)) is not None:
                yield _Group(folder, most, usage, cached)


def _left(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each limited group leaves of its limit."""
    for group in _groups(proc, cgroups):
        if (used := _number(group.folder / group.usage)) is not None:
            free = sum(_stated(group.folder / "memory.stat", each) or 0 for each in group.cached)
            yield max(0, group.most - used + free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """None where a file is missing or says `max`."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _stated(path: Path, name: str) -> int | None:
    """The number after a name at the beginning of a line, in the file's unit."""
    found = (line.split() for line in _lines(path))
    return next((int(words[1]) for words in found if words[:1] == [name]), None)
