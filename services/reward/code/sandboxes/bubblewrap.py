"""A sandbox of namespaces, by bubblewrap (`bwrap`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

from services.reward.code.sandboxes.refused_calls import whole_filter
from services.reward.code.sandboxes.sandbox import (
    MAX_OPEN_FILES,
    SYSTEM_FOLDERS,
    Ended,
    Limits,
    Place,
    Running,
    SandboxError,
    existing,
    limited,
    require,
)


class BubblewrapSandbox:
    """By namespaces. Raises SandboxError where they are missing."""

    def __init__(self) -> None:
        require("bubblewrap", "bwrap", "prlimit")

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Running:
        """Start a program."""
        command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        # Files in /dev/shm take memory that no bound counts, even if they are empty.
        command += ["--dev", "/dev", "--remount-ro", "/dev"]
        for path in dict.fromkeys([*existing(SYSTEM_FOLDERS), *place.readable, str(place.folder)]):
            command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
        bounds = [
            f"--as={limits.memory_bytes}",
            f"--nproc={limits.max_processes}",
            f"--nofile={MAX_OPEN_FILES}",
        ]
        command += ["--remount-ro", "/", "--chdir", str(place.folder), "--", *limited(argv, limits, bounds)]
        try:
            with _in_memory(whole_filter()) as calls:
                command[1:1] = ["--seccomp", str(calls)]
                return _BubblewrapRunning(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        pass_fds=(calls,),
                    )
                )
        except OSError as error:
            raise SandboxError(f"bubblewrap: {error}") from error


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """A descriptor from which that can be read."""
    descriptor = os.memfd_create("calls")
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


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
