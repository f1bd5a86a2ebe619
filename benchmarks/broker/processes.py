"""Runs the processes of a benchmark: a real Redis, a broker as in production, and workers that act as its clients.

Linux only: CPU seconds are read from /proc, so that servers and clients are measured alike.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.children import tail
from penstock.memory.malloc import REDIS_ENVIRONMENT
from penstock.network import rpc
from penstock.process.bound_child import bound

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 600.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ENVIRONMENT = {"GRPC_VERBOSITY": "NONE"}
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(pid: int) -> float:
    """CPU seconds used by a process and all its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    own_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
    children_s = 0.0
    for child in _children(pid):
        # A process that ends just now is counted by its parent the next time.
        with suppress(FileNotFoundError, ProcessLookupError):
            children_s += cpu_s(child)
    return own_s + children_s


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


@dataclass(slots=True)
class Child:
    """A process that ends with the benchmark."""

    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def stop(self) -> None:
        """Stop it and wait for its end."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


@dataclass(slots=True)
class Worker(Child):
    """A process that plays successive roles; see worker.py."""

    log: Path
    """Where it writes all other output."""

    async def prepare(self, role: str, **arguments: Any) -> None:
        """Prepare it for a role."""
        await self._send({"role": role, "arguments": arguments})
        await self._receive("ready")

    async def go(self) -> dict[str, Any]:
        """Let it play; returns its report."""
        await self._send({"go": True})
        return await self._receive("result")

    async def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        await self.process.stdin.drain()

    async def _receive(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with status {await self.process.wait()}:\n{tail(self.log)}")
        answer: dict[str, Any] = json.loads(line)[key]
        return answer


@dataclass(slots=True)
class Stage:
    """An async context of a benchmark: everything started here ends with it."""

    folder: Path
    redis_server: Path
    broker_settings: tuple[str, ...] = ()
    """Further settings of every broker, key=value."""
    redis_url: str = ""
    redis: Child | None = None
    brokers: list[tuple[Child, str]] = field(default_factory=list)
    """Broker processes and their addresses."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        """Start Redis as `penstock run` does (Unix socket, append-only file, flushed every second) and one broker."""
        socket_path = self.folder / "redis.sock"
        settings = {"port": 0, "unixsocket": socket_path, "dir": self.folder, "save": "", "loglevel": "warning"}
        settings |= {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
        settings |= {"auto-aof-rewrite-min-size": "512mb"}
        options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        self.redis_url = f"unix://{socket_path}?db=0"
        try:
            self.redis = await self.start(str(self.redis_server), *options, env=REDIS_ENVIRONMENT)
            self.brokers.append(await self.start_broker())
        except BaseException:
            # Otherwise processes of an interrupted start would write into a removed folder.
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Stop everything."""
        await self._stack.aclose()

    async def start(self, *command: str, env: dict[str, str] | None = None) -> Child:
        """Start a process whose output goes to a log file in the folder; `env` is added to the environment."""
        with (self.folder / "processes.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *bound(*command, ends_by=signal.SIGKILL),
                stdout=log,
                stderr=log,
                env=os.environ | _ENVIRONMENT | (env or {}),
            )
        child = Child(process)
        self._stack.push_async_callback(child.stop)
        return child

    async def start_broker(self, settings: Sequence[str] | None = None) -> tuple[Child, str]:
        """Start a broker as `penstock serve broker` does; returns it and its address.

        `settings` replace `broker_settings`.
        """
        settings = self.broker_settings if settings is None else settings
        address = f"127.0.0.1:{free_port()}"
        child = await self.start(
            *(sys.executable, "-m", "console", "serve", "broker", f"redis_url={self.redis_url}", *settings),
            *("--listen", address),
        )
        if not await rpc.wait_until_serving(address, timeout_s=START_TIMEOUT_S):
            raise RuntimeError(f"the broker did not start; see {self.folder / 'processes.log'}")
        return child, address

    async def start_worker(
        self, *, is_plain: bool = False, python: Path | None = None, env: dict[str, str] | None = None
    ) -> Worker:
        """Start a worker; a plain one, or one in another Python, runs without our tuning of event loop and memory."""
        kind = ["--foreign"] if python else ["--plain"] if is_plain else []
        root = {"PYTHONPATH": str(ROOT)} if python else {}
        log_path = self.folder / "processes.log"
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *bound(
                    *(str(python or sys.executable), "-m", "benchmarks.broker.worker", *kind),
                    ends_by=signal.SIGKILL,
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | _ENVIRONMENT | root | (env or {}),
                limit=64 * 1024 * 1024,
            )
        worker = Worker(process, log_path)
        self._stack.push_async_callback(worker.stop)
        return worker


class CpuMeter:
    """CPU seconds of processes since construction."""

    def __init__(self, **children: Child) -> None:
        self._before = {name: (child.pid, cpu_s(child.pid)) for name, child in children.items()}

    def used_s(self) -> dict[str, float]:
        """CPU seconds by name."""
        return {name: cpu_s(pid) - before for name, (pid, before) in self._before.items()}
