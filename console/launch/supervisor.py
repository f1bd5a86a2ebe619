"""Supervises one process: starts it in its own process group, watches it, restarts it if it dies, and stops it.

Invariants:
- No child of a process survives it: when the leader has ended, the rest of its group is killed.
- It is restarted with the same command (hence on the same port), with back-off; one that dies too often is paused for a
  while, longer each time (`console.launch.restarts`). It is given up for good only if it exits with status 2 (its
  configuration is wrong) without ever having been ready.
- Its output goes to its log through this process (`console.launch.log_files`), which rotates the log and survives a
  full disk.
- Readiness is polled by `ServiceSpec.is_ready`, which has a deadline of its own.
- A service of ours ends when this process is gone (`watch_launcher`); Redis is ended by the kernel
  (`penstock.process.bound_child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import console
from console.config.run_folder import ProcessRecord, started_ticks_of
from console.launch.log_files import LogPump, RotatedLog
from console.launch.restarts import RestartBudget
from penstock.process.bound_child import end_group_with_parent
from penstock.process.tasks import end, set_within

USER_MISTAKE_STATUS = 2
LAUNCHER_VARIABLE = "PENSTOCK_LAUNCHER_PID"
_READY_POLL_S = 0.2
_ORPHAN_GRACE_S = 15.0
_MAX_LINE_CHARACTERS = 400
_TAIL_BYTES = 65536
LOG_BYTES, LOG_FILES = 64 * 2**20, 5
"""Size limit of a log, and how many are kept, including rotated ones."""
_LAST_WORDS_S = 2.0
"""Time to read the process's remaining output; a surviving child may keep the pipe open for longer."""


class ServiceFailedError(Exception):
    """A service ended and is no longer restarted; the message gives the reason and names its log."""


class ProcessState(StrEnum):
    """State of a supervised process."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    PAUSED = "paused"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """What to run and how to know that it is up."""

    name: str
    """Its name in logs, status and files."""
    argv: tuple[str, ...]
    """Command line."""
    address: str
    """host:port it serves, for status; empty if it serves none."""
    metrics: str = ""
    """host:port of its metrics, for status; empty if it serves none."""
    env: Mapping[str, str]
    """Its whole environment."""
    log_path: Path
    """Receives its output, appended."""
    is_ready: Callable[[], Awaitable[bool]]
    """Whether it is up; polled after a start."""
    kind: str = ""
    """Processes of one kind can replace each other; one without a kind cannot be replaced."""
    stop_grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    log_bytes: int = LOG_BYTES
    """Size at which its log is rotated."""
    log_files: int = LOG_FILES
    """Logs kept, including the current one."""


class SupervisedProcess:
    """Keeps one process running until it is stopped."""

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        on_change: Callable[[ProcessRecord], None],
        on_refused_write: Callable[[OSError], None] = lambda error: None,
        pauses: bool = True,
    ) -> None:
        """Without `pauses`, a process that dies too often is given up, and the caller decides."""
        self.spec = spec
        self._on_refused_write = on_refused_write
        self._log = RotatedLog(spec.log_path, max_bytes=spec.log_bytes, num_files=spec.log_files)
        self.ready = asyncio.Event()
        self.num_restarts = 0
        self.state = ProcessState.STARTING
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._pauses = pauses
        self._budget = RestartBudget()
        self._ready_s = 0.0
        self._why = ""
        self._since_s = time.time()

    async def run(self) -> None:
        """Start, watch and restart until `stop`. Raises ServiceFailedError when it is given up for good."""
        was_ever_ready = False
        while not self._stopping.is_set():
            status = await self._run_once()
            if self._stopping.is_set():
                break
            up_s = time.monotonic() - self._ready_s if self.ready.is_set() else None
            was_ever_ready = was_ever_ready or self.ready.is_set()
            self.ready.clear()
            verdict = self._budget.ended(up_s=up_s)
            is_mistake = status == USER_MISTAKE_STATUS and not was_ever_ready
            if is_mistake or (verdict.is_pause and not self._pauses):
                self._why = self._how(status)
                self._set_state(ProcessState.FAILED)
                raise ServiceFailedError(
                    f"{self.spec.name} {self._why} and is not restarted (log: {self.spec.log_path})"
                )
            if verdict.is_pause:
                self._why = f"{self._how(status)}; next try {_clock_time(time.time() + verdict.delay_s)}"
                self._set_state(ProcessState.PAUSED)
                await set_within(self._stopping, verdict.delay_s)
                self._why = ""
            self.num_restarts += not self._stopping.is_set()
            self._set_state(ProcessState.RESTARTING)
            if not verdict.is_pause:
                await set_within(self._stopping, verdict.delay_s)

    async def stop(self, *, within_s: float | None = None) -> None:
        """Ask it to end, wait `within_s` (`stop_grace_s` unless given), then kill its group. Idempotent."""
        self._stopping.set()
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.spec.stop_grace_s if within_s is None else within_s):
                    await process.wait()
            except TimeoutError:
                self.kill()
                await process.wait()
        self.kill()
        self._set_state(ProcessState.STOPPED)

    def kill(self) -> None:
        """Kill the process and its group, at once."""
        self._stopping.set()
        self._kill_group()

    async def _run_once(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            self._log.open()
        except OSError as error:
            self._on_refused_write(error)
        pump = LogPump(self._log, on_refusal=lambda error: self._take_refusal(loop, error))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=pump.writing_end,
                stderr=subprocess.STDOUT,
                env=dict(self.spec.env),
                start_new_session=True,
            )
        finally:
            pump.start()
        self._set_state(self.state)
        watcher = asyncio.create_task(self._watch_readiness())
        try:
            return await self._process.wait()
        finally:
            await end(watcher)
            self._kill_group()
            await asyncio.to_thread(pump.join, _LAST_WORDS_S)

    def _take_refusal(self, loop: asyncio.AbstractEventLoop, error: OSError) -> None:
        # Called in the pump's thread, which may outlive the loop.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_refused_write, error)

    async def _watch_readiness(self) -> None:
        while not await self.spec.is_ready():  # noqa: ASYNC110 - another process's readiness sets no event here
            await asyncio.sleep(_READY_POLL_S)
        self._ready_s = time.monotonic()
        self.ready.set()
        self._set_state(ProcessState.READY)

    def _kill_group(self) -> None:
        # The group may be empty (macOS reports this as EPERM).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _set_state(self, state: ProcessState) -> None:
        if state != self.state:
            self._since_s = time.time()
        self.state = state
        pid = self._process.pid if self._process is not None else 0
        self._on_change(
            ProcessRecord(
                name=self.spec.name,
                pid=pid,
                started_ticks=(started_ticks_of(pid) or 0) if pid else 0,
                address=self.spec.address,
                metrics=self.spec.metrics,
                state=state.value,
                num_restarts=self.num_restarts,
                why=self._why,
                since_s=self._since_s,
            )
        )

    def _how(self, status: int) -> str:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        said = last_line(self.spec.log_path)
        return f"{how}: {said}" if said else how


def _clock_time(unix_s: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(unix_s))


def console_argv(*arguments: str) -> tuple[str, ...]:
    """Command line of this console; `-P` prevents importing a `services` or `console` from the user's folder."""
    return (sys.executable, "-P", "-m", "console", *arguments)


def service_environment(base: Mapping[str, str], *, num_threads: int) -> dict[str, str]:
    """The environment of a service: a set number of threads, no downloads, its launcher's pid.

    Spinning OpenMP threads of several processes on few cores halve each other, hence the passive wait policy.
    """
    root = str(Path(console.__file__).resolve().parents[1])
    threads = str(num_threads)
    added = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, base.get("PYTHONPATH", "")))),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    return {**base, **added}


def watch_launcher() -> None:
    """In a service: end its process group when the launcher that started it is gone, even if it was killed.

    Children of a service inherit the environment but have another parent, and do not watch.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    if launcher.isdecimal() and os.getppid() == int(launcher) and os.getpgrp() == os.getpid():
        end_group_with_parent(int(launcher), grace_s=_ORPHAN_GRACE_S)


def last_line(path: Path) -> str:
    """The last non-empty line of a log, shortened; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:_MAX_LINE_CHARACTERS] for line in reversed(lines) if line.strip()), "")
