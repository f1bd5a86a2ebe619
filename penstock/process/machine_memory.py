"""How much memory of its machine a process can still have: what the kernel offers, and what its cgroups leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What all processes of this machine, or of this container, can still have together; caches count as free."""
    free = _stated(proc / "meminfo", "MemAvailable:")
    if free is None:
        # Not Linux: all that the machine has.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((free * 1024, *_left(proc, cgroups)))


def _left(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each limited group leaves of its limit, from the one of this process upwards."""
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
        for group in (own, *own.parents):
            if not group.is_relative_to(root):
                break
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None:
                free = sum(_stated(group / "memory.stat", each) or 0 for each in cached)
                yield max(0, most - used + free)


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
