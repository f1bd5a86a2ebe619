"""Starts programs that can reach nothing: no network, no file but what they may read, bounded memory and processes.

| | confined by | memory | needs |
|---|---|---|---|
| `sandlock` | Landlock and seccomp (package sandlock) | of all processes together | Linux 6.7, `prlimit` |
| `bubblewrap` | namespaces (`bwrap`) | of each process | user namespaces, `prlimit` |
| `container` | a container (`containers`) | of all processes together | Docker or Podman |

Programs may write no file at all. A program that ends, or is ended, takes all its processes with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.reward.code.containers import ContainerSandbox
from services.reward.code.sandbox import (
    MAX_OPEN_FILES,
    SYSTEM_FOLDERS,
    Ended,
    Limits,
    Place,
    Running,
    Sandbox,
    SandboxError,
    existing,
    limited,
    require,
)

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class SandlockSandbox:
    """By Landlock and seccomp. Raises SandboxError where they are missing."""

    def __init__(self) -> None:
        try:
            import sandlock
        except (ImportError, OSError) as error:
            raise SandboxError(f"sandlock: {error}: pip install sandlock") from error
        require("sandlock", "prlimit")
        found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if found < needed:
            raise SandboxError(f"sandlock: this kernel has Landlock ABI {found}, {needed} is needed (Linux 6.7)")
        self._sandlock = sandlock

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Running:
        """Start a program."""
        library = self._sandlock
        piped, none = library.StdioMode.PIPED, library.StdioMode.NULL
        box = library.Sandbox(
            fs_readable=[*existing(SYSTEM_FOLDERS), *_DEVICES, *place.readable, str(place.folder)],
            fs_writable=["/dev/null"],
            max_memory=limits.memory_bytes,
            max_processes=limits.max_processes,
            max_open_files=MAX_OPEN_FILES,
            clean_env=True,
            no_coredump=True,
            cwd=str(place.folder),
        )
        try:
            return _SandlockRunning(box.popen(limited(argv, limits), stdin=piped, stdout=piped, stderr=none))
        except (RuntimeError, OSError, ValueError, library.SandlockError) as error:
            hint = "a container's seccomp profile has to allow Landlock and seccomp, as seccomp=unconfined does"
            raise SandboxError(f"sandlock: {error} ({hint})") from error


class _SandlockRunning:
    def __init__(self, process: Any) -> None:
        self._process = process
        self.stdin, self.stdout = process.stdin.fileno(), process.stdout.fileno()

    def wait(self, timeout_s: float) -> Ended:
        ended = self._process.wait(max(timeout_s, 0.001))
        if ended.error is not None or ended.reason is None:
            raise SandboxError(f"sandlock: {ended.error or 'no reason for the end'}")
        reason = type(ended.reason)
        if ended.reason is reason.TIMEOUT:
            return Ended("its time")
        if ended.reason is reason.KILLED:
            return Ended("its memory or CPU time")
        if ended.reason is reason.SIGNALED and ended.signal == signal.SIGXCPU:
            return Ended("its CPU time")
        return Ended(succeeded=ended.exit_code == 0)

    def end(self) -> None:
        self._process.__exit__(None, None, None)


class BubblewrapSandbox:
    """By namespaces. Raises SandboxError where they are missing."""

    def __init__(self) -> None:
        require("bubblewrap", "bwrap", "prlimit")

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Running:
        """Start a program."""
        command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--dev", "/dev"]
        for path in dict.fromkeys([*existing(SYSTEM_FOLDERS), *place.readable, str(place.folder)]):
            command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
        bounds = [f"--as={limits.memory_bytes}", f"--nproc={limits.max_processes}", f"--nofile={MAX_OPEN_FILES}"]
        command += ["--remount-ro", "/", "--chdir", str(place.folder), "--", *limited(argv, limits, bounds)]
        try:
            return _BubblewrapRunning(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        except OSError as error:
            raise SandboxError(f"bubblewrap: {error}") from error


class _BubblewrapRunning:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin.fileno(), process.stdout.fileno()

    def wait(self, timeout_s: float) -> Ended:
        try:
            status = self._process.wait(max(timeout_s, 0.001))
        except subprocess.TimeoutExpired:
            return Ended("its time")
        is_limit = status in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)
        return Ended("its memory or CPU time" if is_limit else "", succeeded=status == 0)

    def end(self) -> None:
        # The first process of the namespace takes all others with it.
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


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
