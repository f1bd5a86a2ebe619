"""What a sandbox is: the interface of all of them, and what they share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
MAX_OPEN_FILES = 64
_PACKAGES = {
    "bwrap": "bubblewrap",
    "runc": "runc",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "timeout": "coreutils",
}


class SandboxError(Exception):
    """A sandbox could not be made, or cannot tell how its program ended: that says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    max_processes: int
    output_bytes: int
    life_s: float = 86400.0
    """Seconds after which it ends even if its supervisor is gone: longer than any program may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a program sees."""

    folder: Path
    """Its working directory, which every user may read."""
    readable: Sequence[str]
    """Further files and folders."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    limit: str = ""
    """Which limit it exceeded; empty if none."""
    succeeded: bool = False
    """Whether its exit status was 0."""


class Running(Protocol):
    """A program that was started; `end` it."""

    stdin: int
    """Descriptor to write to."""
    stdout: int

    def wait(self, timeout_s: float) -> Ended:
        """How it ended; it is killed after `timeout_s`. Raises SandboxError if that cannot be determined."""

    def end(self) -> None:
        """End all its processes and close both descriptors."""


class Sandbox(Protocol):
    """Starts programs."""

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Running:
        """Start one. Raises SandboxError."""


def limited(argv: Sequence[str], limits: Limits, bounds: Sequence[str] = ()) -> list[str]:
    """The command of a program whose processes have bounded CPU time, and the further `bounds` of prlimit.

    No file grows, nor one in memory (`memfd_create`), which a bound on address space does not count.
    """
    seconds = max(1, round(limits.cpu_s))
    own = [f"--cpu={seconds}:{seconds + 1}", "--core=0", "--fsize=0"]
    return [str(shutil.which("prlimit")), *own, *bounds, "--", *argv]


def put(path: Path, content: bytes) -> None:
    """A file that every user may read."""
    path.write_bytes(content)
    path.chmod(0o644)


def require(sandbox: str, *programs: str) -> None:
    """Raises SandboxError unless all are here. Without prlimit nothing would bound CPU time."""
    for program in programs:
        if shutil.which(program) is None:
            raise SandboxError(f"{sandbox}: there is no {program} here: apt-get install {_PACKAGES[program]}")


def existing(paths: Sequence[str]) -> list[str]:
    """Those that are here."""
    return [path for path in paths if os.path.lexists(path)]
