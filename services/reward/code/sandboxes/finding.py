"""Finds a sandbox that works here: one in which a program reaches nothing, and that bounds what it uses.

| | confined by | memory | needs |
|---|---|---|---|
| `sandlock` | Landlock and seccomp (package sandlock) | of all processes together | Linux 6.7, `prlimit` |
| `bubblewrap` | namespaces (`bwrap`) | of each process | user namespaces, `prlimit` |
| `runc` | a container of that runtime, without an engine | of all processes together | root, `runc` |
| `container` | a container of an engine | of all processes together | Docker or Podman |

Programs may write no file at all. A program that ends, or is ended, takes all its processes with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from services.reward.code.sandboxes.bubblewrap import BubblewrapSandbox
from services.reward.code.sandboxes.containers import ContainerSandbox
from services.reward.code.sandboxes.refused_calls import refuse_by_arguments
from services.reward.code.sandboxes.runc import RuncSandbox
from services.reward.code.sandboxes.sandbox import Limits, Place, Sandbox, SandboxError
from services.reward.code.sandboxes.sandlock import SandlockSandbox

_STARTS_MANY = """
import os, time
is_bounded = False
for _ in range(8):
    try:
        is_child = os.fork() == 0
    except OSError:
        is_bounded = True
        break
    if is_child:
        time.sleep(10)
        os._exit(0)
print("bounded" if is_bounded else "all", flush=True)
"""
"""Tries to start twice as many processes as `_try` allows."""
KINDS: dict[str, Callable[[], Sandbox]] = {
    "sandlock": SandlockSandbox,
    "bubblewrap": BubblewrapSandbox,
    "runc": RuncSandbox,
    "container": ContainerSandbox,
}
"""By name, the fastest first."""


def find_sandbox(name: str) -> tuple[str, Sandbox]:
    """The sandbox of that name, or with `auto` the first that works here, and its name; tried with a program.

    Raises:
        SandboxError: None works; says why of each.
    """
    problems = []
    for kind in KINDS if name == "auto" else [name]:
        try:
            return kind, tried_sandbox(kind)
        except SandboxError as error:
            problems.append(str(error))
    raise SandboxError("; ".join(problems))


def sandbox_of_cell(name: str) -> Sandbox:
    """As `find_sandbox`, for a process that does nothing but start programs: confines it where they need that."""
    kind, sandbox = find_sandbox(name)
    if kind == "sandlock":
        refuse_by_arguments()
    return sandbox


def tried_sandbox(kind: str) -> Sandbox:
    """The sandbox of that kind, tried with a program. Raises SandboxError: it does not work here."""
    sandbox = KINDS[kind]()
    _try(sandbox)
    return sandbox


def python_folders() -> list[str]:
    """What this Python itself is read from."""
    return list(dict.fromkeys([os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)]))


def _try(sandbox: Sandbox) -> None:
    """Raises SandboxError unless a program runs in it, can not read what it may not, and starts no more than it may."""
    limits = Limits(cpu_s=5, wall_s=20, memory_bytes=256 * 1024**2, max_processes=4, output_bytes=1024)
    place = Place(folder=Path("/usr"), readable=python_folders())
    for program, expected in (("print(6 * 7)", b"42\n"), ("print(open('/etc/passwd').read())", b"")):
        printed = _printed_by(program, sandbox, place, limits)
        if printed != expected:
            raise SandboxError(f"a program that should print {expected!r} in it printed {printed[:80]!r}")
    if _printed_by(_STARTS_MANY, sandbox, place, limits) != b"bounded\n":
        raise SandboxError(
            "a program could start more processes in it than it may; Linux does not count those of root: run the "
            "reward worker as another user"
        )


def _printed_by(program: str, sandbox: Sandbox, place: Place, limits: Limits) -> bytes:
    running = sandbox.start([os.path.realpath(sys.executable), "-I", "-S", "-c", program], place=place, limits=limits)
    try:
        return os.read(running.stdout, 1024)
    finally:
        running.end()
