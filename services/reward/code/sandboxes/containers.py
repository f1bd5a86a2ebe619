"""A sandbox of containers: one for each program, made by the command line of Docker or Podman.

The image is empty, made here and nowhere fetched; containers see the system's folders of this machine, read-only, as
other sandboxes' programs do. So the engine has to be this machine's own.

Invariants:
- A container ends with its program, with `end`, when the process that started it dies (its command line then passes
  SIGTERM on), or else after `Limits.life_s`.
- What goes wrong with the engine is a SandboxError, not an ending of the program: a program can write nothing to the
  error output of the command line, and its time begins when its container has started.
- Each runs as a user of its own, whose processes are counted: a bound on the container's would also count the threads
  of the engine's own that start it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.reward.code.sandboxes.sandbox import (
    MAX_OPEN_FILES,
    SYSTEM_FOLDERS,
    Ended,
    Limits,
    Place,
    SandboxError,
    existing,
    limited,
    require,
)

ENGINES = ("docker", "podman")
IMAGE = "penstock-sandbox:1"
STARTING_PIDS = 64
"""Most processes of a container, with the threads that start it."""
_CONFINED = (
    *("--network", "none", "--ipc", "none", "--hostname", "sandbox", "--cpus", "1", "--read-only", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--pids-limit", str(STARTING_PIDS)),
)
_PODMANS = (
    *("--read-only-tmpfs=false", "--passwd=false"),
    *("--ulimit", f"nofile={MAX_OPEN_FILES}", "--ulimit", f"nproc={STARTING_PIDS}"),
)
"""Its own bounds are above what it may set where this process is bounded itself."""
_STARTED = b"R"
_ANNOUNCED = (f'printf {_STARTED.decode()}; exec "$@"', "sh")
"""Says that the container has started, then becomes the program."""
_UNHEARD: Any = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
_COMMAND_TIMEOUT_S, _START_TIMEOUT_S, _END_TIMEOUT_S = 20.0, 30.0, 20.0
_ERRORS = re.compile(
    r"^(docker: |Error: |error |Error response |runc run failed|time=\S+ level=(error|fatal) )", re.MULTILINE
)
"""How lines begin in which a command line says what went wrong."""
_FIRST_USER, _USERS_OF_A_PROCESS = 2**28, 8
"""Above those of people and services; a process has fewer containers at once than users."""
_numbers = itertools.count()


class ContainerSandbox:
    """By containers of an engine on this machine. Raises SandboxError where there is none."""

    def __init__(self) -> None:
        require("container", "prlimit", "setpriv", "timeout")
        problems = []
        for name in ENGINES:
            engine = shutil.which(name)
            problem = f"there is no {name} here" if engine is None else _root_problem(name) or _image_problem(engine)
            if engine is not None and not problem:
                self._engine, self._is_podman = engine, name == "podman"
                return
            problems.append(problem)
        raise SandboxError(f"container: {'; '.join(problems)}")

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Container:
        """Start a program; returns once its container has started."""
        name = f"penstock-code-{secrets.token_hex(8)}"
        command = self._run(name, argv, place, limits)
        return start_container(command, kill=[self._engine, "kill", name], folder=place.folder)

    def _run(self, name: str, argv: Sequence[str], place: Place, limits: Limits) -> list[str]:
        """The command that starts a container, and stays until it has ended."""
        user, memory = str(own_user()), str(limits.memory_bytes)
        command = [self._engine, "run", "--rm", "--name", name, "--pull", "never", "--log-driver", "none"]
        command += ["--interactive", "--attach", "stdin", "--attach", "stdout", *_CONFINED]
        command += ["--user", f"{user}:{user}", "--memory", memory, "--memory-swap", memory]
        command += _PODMANS if self._is_podman else ()
        for path in seen_paths(place):
            command += ["--mount", f"type=bind,source={path},target={path},readonly"]
        return [*command, "--workdir", str(place.folder), IMAGE, *kept(argv, limits)]


def own_user() -> int:
    """A user id that no other process of this machine has."""
    return _FIRST_USER + os.getpid() * _USERS_OF_A_PROCESS + next(_numbers) % _USERS_OF_A_PROCESS


def seen_paths(place: Place) -> list[str]:
    """What a container has of this machine, to read."""
    return list(dict.fromkeys([*existing(SYSTEM_FOLDERS), *place.readable, str(place.folder)]))


def kept(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command of a container in which the program is bounded, and says that it has started."""
    # The first process, one of its user's: forwards SIGTERM, and kills what does not heed it.
    keeper = [str(shutil.which("timeout")), "-k", "0.1", "-s", "KILL", str(round(limits.life_s))]
    bounds = [f"--nofile={MAX_OPEN_FILES}", f"--nproc={limits.max_processes + 1}"]
    return [*keeper, "/bin/sh", "-c", *_ANNOUNCED, *limited(argv, limits, bounds)]


def _has_output(descriptor: int, timeout_s: float) -> bool:
    """Whether there is something to read, or the end, within this time. Descriptors may be above `select`'s 1,024."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def start_container(
    command: Sequence[str], *, kill: Sequence[str], folder: Path, held: contextlib.ExitStack | None = None
) -> Container:
    """Start a container by a command line; returns once its program has started.

    Args:
        command: Stays until the container has ended.
        kill: Ends the container.
        folder: The command line's working directory: Podman's may leave a file there that says why it was killed.
        held: Closed once it has ended.

    Raises:
        SandboxError: It did not start.
    """
    held = held or contextlib.ExitStack()
    errors = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    # The command line gets SIGTERM when this process dies, and passes it on.
    whole = [str(shutil.which("setpriv")), "--pdeathsig", "TERM", *command]
    try:
        process = subprocess.Popen(whole, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    except OSError as error:
        held.close()
        raise SandboxError(f"container: {error}") from error
    container = Container(process, errors.fileno(), kill=kill, held=held)
    try:
        container.await_start()
    except BaseException:
        container.end()
        raise
    return container


class Container:
    """A program in its container."""

    def __init__(
        self, process: subprocess.Popen[bytes], errors: int, *, kill: Sequence[str], held: contextlib.ExitStack
    ) -> None:
        """`process` is the command line, which writes to `errors`."""
        self._process, self._errors, self._kill, self._held = process, errors, kill, held
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin.fileno(), process.stdout.fileno()

    def await_start(self) -> None:
        """Return when the program has started. Raises SandboxError."""
        ready = _has_output(self.stdout, _START_TIMEOUT_S)
        if not ready or os.read(self.stdout, 1) != _STARTED:
            said = self._said() or ("it ended at once" if ready else f"not within {_START_TIMEOUT_S:g} s")
            raise SandboxError(f"container: it did not start: {said}")

    def wait(self, timeout_s: float) -> Ended:
        """How the program ended."""
        try:
            status = self._process.wait(max(timeout_s, 0.001))
        except subprocess.TimeoutExpired:
            return Ended("its time")
        if _ERRORS.search(self._said()):
            raise SandboxError(f"container: {self._said()}")
        is_limit = status in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)
        return Ended("its memory or CPU time" if is_limit else "", succeeded=status == 0)

    def end(self) -> None:
        """End all its processes and close both descriptors. Raises SandboxError: it does not end."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        # Repeated, because it may not have started yet.
        while (status := self._process.poll()) is None and time.monotonic() < deadline_s:
            killing = subprocess.Popen(self._kill, **_UNHEARD)
            # Meanwhile read on: an engine that cannot pass on what is printed does not end the container.
            while killing.poll() is None and time.monotonic() < deadline_s:
                self._discard_output(0.05)
            killing.kill()
            killing.wait()
            self._discard_output(0.2)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._held.close()
        if status is None:
            raise SandboxError(f"container: it does not end; {shlex.join(self._kill)}")

    def _discard_output(self, seconds: float) -> None:
        """Read what is still printed, for a while."""
        until_s = time.monotonic() + seconds
        while self._process.poll() is None and (left_s := until_s - time.monotonic()) > 0:
            ready = _has_output(self.stdout, left_s)
            if ready and not os.read(self.stdout, 65536):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(left_s)

    def _said(self) -> str:
        """What the command line has to say."""
        return os.pread(self._errors, 2000, 0).decode("utf-8", "replace").strip()


def _root_problem(name: str) -> str:
    """Why this user's containers are not bounded, or nothing: Podman has no service that starts them as root."""
    if name == "podman" and os.geteuid() != 0:
        return "podman without root cannot bound a program's memory and users; use sandlock or bubblewrap"
    return ""


def _image_problem(engine: str) -> str:
    """Makes the image unless it is there; returns why that failed, or nothing."""
    if not _command(engine, "image", "inspect", IMAGE):
        return ""
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w") as tar:
        folder = tarfile.TarInfo("usr")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
    return _command(engine, "import", "-", IMAGE, given=root.getvalue())


def _command(engine: str, *arguments: str, given: bytes = b"") -> str:
    """Run a command of the engine; returns why it failed, or nothing."""
    try:
        done = subprocess.run(
            [engine, *arguments], input=given, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{engine}: {error}"
    said = done.stderr.decode("utf-8", "replace").strip()
    return f"{engine}: {said[:300] or f'status {done.returncode}'}" if done.returncode else ""
