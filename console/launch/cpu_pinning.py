"""Pins engines that decode on CPUs to dedicated cores.

A step of such an engine takes milliseconds. If it shares its core with a computing trainer, the system repeatedly makes
it wait for longer than that; `docs/benchmarks.md` states the cost.

Invariants:
- Only processes of this run are pinned. Its other processes stay off its engines' cores, and no engine of another run
  of the same user has any of them.
- If there are too few cores, or the system cannot pin processes to cores, nothing is pinned.
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
    """Assigns cores to the processes of a run.

    Args:
        usable: Cores that this process may use.
        engines: Names of the generators whose engines get dedicated cores.
        num_threads: Threads of each engine, of all its workers.
        num_others: Cores that must be left for all other processes.
        folder: Where engines' claims are recorded, one folder per user.
    """

    def __init__(
        self, usable: Collection[int], *, engines: Collection[str], num_threads: int, num_others: int, folder: Path
    ) -> None:
        self.of_engine: dict[str, frozenset[int]] = {}
        """Cores of each generator; empty if nothing is pinned."""
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
        """The cores of a run that starts this many generators here."""
        generator = config.generator
        has_own = generator.decodes_on_cpus()
        return cls(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (),
            engines=[f"generator-{index}" for index in range(num_generators if has_own else 0)],
            num_threads=generator.num_threads * generator.tensor_parallel * generator.pipeline_parallel,
            num_others=config.trainer.num_threads * len(config.trainer.shares),
            folder=Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}-cores",
        )

    def bind(self, name: str, pid: int) -> None:
        """Pin a process of the run and its descendants: a generator's are its engine."""
        if not self.of_engine:
            return
        _bind(pid, self.of_others)
        for descendant in _descendants(pid):
            _bind(descendant, self.of_engine.get(name, self.of_others))

    def release(self) -> None:
        """Release the cores to engines of other runs. Idempotent."""
        while self._claims:
            os.close(self._claims.pop())


def _claims(cores: Collection[int], folder: Path) -> dict[int, int]:
    """Locked files of the cores that no engine of another run has, by core; a lock ends with its process."""
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
                # Claimed by another run; or the file system has no locks.
                os.close(descriptor)
    return claims


def _bind(pid: int, cores: Collection[int]) -> None:
    """Pin all threads of a process; threads that have ended or are not ours are skipped."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)


def _descendants(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
        yield each
