"""A sandbox of containers: one for each program, made by Docker's or Podman's command line.

The image is empty, made here and nowhere fetched; containers see the system's folders of this machine, read-only, as
other sandboxes' programs do. So the engine has to be this machine's own.

Invariants:
- A container ends with its program, with `end`, when the process that started it dies (its command line then passes
  SIGTERM on), or else after `Limits.life_s`.
- What goes wrong with the engine is a SandboxError, not an ending of the program: a program can write nothing to the
  error output of the command line, and its time begins when its container has started.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from services.reward.code.sandbox import (
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
NOBODY = "65534:65534"
_CONFINED = (
    *("--network", "none", "--ipc", "none", "--hostname", "sandbox", "--user", NOBODY, "--cpus", "1"),
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)
_STARTED = b"R"
_ANNOUNCED = (f'printf {_STARTED.decode()}; read -r _; exec "$@"', "sh")
"""Says that the container has started, waits for a line, then becomes the program."""
_STARTING_PIDS = 64
"""While a container starts, threads of the engine's own are among its processes; with fewer it fails now and then."""
_UNHEARD: Any = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
_COMMAND_TIMEOUT_S, _START_TIMEOUT_S, _END_TIMEOUT_S = 20.0, 30.0, 20.0
_ENGINES_ERRORS = ("docker: ", "Error: ", "error ", "Error response ")


class ContainerSandbox:
    """By containers of an engine on this machine. Raises SandboxError where there is none."""

    def __init__(self) -> None:
        require("container", "prlimit", "setpriv", "timeout")
        problems = []
        for name in ENGINES:
            engine = shutil.which(name)
            problem = f"there is no {name} here" if engine is None else _image_problem(engine)
            if engine is not None and not problem:
                self._engine, self._is_podman = engine, name == "podman"
                return
            problems.append(problem)
        raise SandboxError(f"container: {'; '.join(problems)}")

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Container:
        """Start a program; returns once its container has started."""
        name = f"penstock-code-{secrets.token_hex(8)}"
        # The command line gets SIGTERM when this process dies, and passes it on.
        command = [str(shutil.which("setpriv")), "--pdeathsig", "TERM", *self._run(name, argv, place, limits)]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by the container
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            errors.close()
            raise SandboxError(f"container: {error}") from error
        container = Container(self._engine, name, process, errors)
        try:
            # `timeout` is one of its processes.
            container.await_start(max_processes=limits.max_processes + 1)
        except BaseException:
            container.end()
            raise
        return container

    def _run(self, name: str, argv: Sequence[str], place: Place, limits: Limits) -> list[str]:
        """The command that starts a container, and stays until it has ended."""
        memory = str(limits.memory_bytes)
        command = [self._engine, "run", "--rm", "--name", name, "--pull", "never", "--log-driver", "none"]
        command += ["--interactive", "--attach", "stdin", "--attach", "stdout", *_CONFINED]
        command += ["--pids-limit", str(_STARTING_PIDS), "--memory", memory, "--memory-swap", memory]
        command += ["--read-only-tmpfs=false"] if self._is_podman else []
        for path in dict.fromkeys([*existing(SYSTEM_FOLDERS), *place.readable, str(place.folder)]):
            command += ["--mount", f"type=bind,source={path},target={path},readonly"]
        bounded = limited(argv, limits, [f"--nofile={MAX_OPEN_FILES}"])
        # The first process: forwards SIGTERM, and kills what does not heed it.
        keeper = [str(shutil.which("timeout")), "-k", "0.1", "-s", "KILL", str(round(limits.life_s))]
        return [*command, "--workdir", str(place.folder), IMAGE, *keeper, "/bin/sh", "-c", *_ANNOUNCED, *bounded]


class Container:
    """A program in its container."""

    def __init__(self, engine: str, name: str, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        """`process` is the engine's command line, which writes to `errors`."""
        self._engine, self._name, self._process, self._errors = engine, name, process, errors
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin.fileno(), process.stdout.fileno()

    def await_start(self, *, max_processes: int) -> None:
        """Return when the program has started, with as many processes as it may have. Raises SandboxError."""
        ready, _, _ = select.select([self.stdout], [], [], _START_TIMEOUT_S)
        if not ready or os.read(self.stdout, 1) != _STARTED:
            said = self._said() or ("it ended at once" if ready else f"not within {_START_TIMEOUT_S:g} s")
            raise SandboxError(f"container: it did not start: {said}")
        if problem := _command(self._engine, "update", "--pids-limit", str(max_processes), self._name):
            raise SandboxError(f"container: its processes cannot be bounded: {problem}")
        with contextlib.suppress(BrokenPipeError):
            os.write(self.stdin, b"\n")

    def wait(self, timeout_s: float) -> Ended:
        """How the program ended."""
        try:
            status = self._process.wait(max(timeout_s, 0.001))
        except subprocess.TimeoutExpired:
            return Ended("its time")
        if any(line.startswith(_ENGINES_ERRORS) for line in self._said().splitlines()):
            raise SandboxError(f"container: {self._said()}")
        is_limit = status in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)
        return Ended("its memory or CPU time" if is_limit else "", succeeded=status == 0)

    def end(self) -> None:
        """End all its processes and close both descriptors. Raises SandboxError: it does not end."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        # Repeated, because it may not have started yet.
        while (status := self._process.poll()) is None and time.monotonic() < deadline_s:
            killing = subprocess.Popen([self._engine, "kill", self._name], **_UNHEARD)
            # Meanwhile read on: an engine that cannot pass on what is printed does not end the container.
            while killing.poll() is None and time.monotonic() < deadline_s:
                self._discard_output(0.05)
            killing.kill()
            killing.wait()
            self._discard_output(0.2)
        self._process.kill()
        self._process.wait()
        self._errors.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if status is None:
            raise SandboxError(f"container: {self._name} does not end; {self._engine} kill {self._name}")

    def _discard_output(self, seconds: float) -> None:
        """Read what is still printed, for a while."""
        until_s = time.monotonic() + seconds
        while self._process.poll() is None and (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self.stdout], [], [], left_s)
            if ready and not os.read(self.stdout, 65536):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(left_s)

    def _said(self) -> str:
        """What the engine's command line has to say."""
        return os.pread(self._errors.fileno(), 2000, 0).decode("utf-8", "replace").strip()


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
