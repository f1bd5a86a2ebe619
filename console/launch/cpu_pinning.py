"""CPU cores of their own for engines that decode on CPUs.

A step of such an engine takes milliseconds. Where it shares its core with a trainer that computes, the system lets it
wait for longer than that, again and again; `docs/benchmarks.md` says what that costs.

Invariants:
- What is bound is processes of this run. Its engines' cores are left by all others of it, and no engine of another run
  of the same user has one of them.
- Where there are too few cores for that, or the system cannot bind processes to cores, nothing is bound.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from console.config.config import RunConfig


class Cores:
    """Who of a run computes where.

    Args:
        usable: Cores that this process may use.
        engines: Names of the generators whose engines are to have cores of their own.
        num_threads: Threads of each engine.
        num_others: Cores that must be left for everything else.
        folder: Where engines' claims are noted; the user's own.
    """

    def __init__(
        self, usable: Collection[int], *, engines: Collection[str], num_threads: int, num_others: int, folder: Path
    ) -> None:
        self.of_engine: dict[str, frozenset[int]] = {}
        """By generator; empty where nothing is bound."""
        self.of_others: frozenset[int] = frozenset()
        num_wanted = len(engines) * num_threads
        claims = _claims(usable, folder) if num_wanted and len(usable) >= num_wanted + num_others else {}
        if len(claims) < num_wanted + num_others:
            num_wanted = 0
        own, others = sorted(claims)[len(claims) - num_wanted :], sorted(claims)[: len(claims) - num_wanted]
        self._claims = [claims[core] for core in own]
        for core in others:
            os.close(claims[core])
        if own:
            self.of_others = frozenset(others)
            cores = iter(own)
            self.of_engine = {name: frozenset(next(cores) for _ in range(num_threads)) for name in engines}

    @classmethod
    def of_run(cls, config: RunConfig, *, num_generators: int) -> Cores:
        """Those of a run that starts this many generators here."""
        has_own = config.generator.decodes_on_cpus()
        return cls(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (),
            engines=[f"generator-{index}" for index in range(num_generators if has_own else 0)],
            num_threads=config.generator.num_threads,
            num_others=config.trainer.num_threads * len(config.trainer.shares),
            folder=Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}-cores",
        )

    def bind(self, name: str, pid: int) -> None:
        """Bind a process of the run, and those it has started: a generator's are its engine."""
        if not self.of_engine:
            return
        _bind(pid, self.of_others)
        for descendant in _descendants(pid):
            _bind(descendant, self.of_engine.get(name, self.of_others))

    def release(self) -> None:
        """Let engines of other runs have the cores; idempotent."""
        while self._claims:
            os.close(self._claims.pop())


def _claims(cores: Collection[int], folder: Path) -> dict[int, int]:
    """Locked files of those cores that no engine of another run has, by core; the lock ends with its process."""
    claims: dict[int, int] = {}
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return {}
        for core in cores:
            descriptor = os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                claims[core] = descriptor
            except OSError:
                # Another run's; or the file system knows no locks.
                os.close(descriptor)
    return claims


def _bind(pid: int, cores: Collection[int]) -> None:
    """All threads of a process; what has ended meanwhile, or is not ours, is left alone."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)


def _descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
        yield each
