"""A sandbox of Landlock and seccomp, by the package sandlock."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from services.reward.code.sandboxes.refused_calls import REFUSED
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
            # The package refuses no call by its arguments: see `refuse_by_arguments`.
            extra_deny_syscalls=REFUSED,
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
