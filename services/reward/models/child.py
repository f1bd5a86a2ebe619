"""A child process that answers one line with one line, and is killed where it does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0


class ChildEndedError(Exception):
    """The child ended, or was ended, without an answer."""


class ChildTimeoutError(TimeoutError):
    """The child did not answer in time, and was ended."""

    def __init__(self, cpu_s: float) -> None:
        """`cpu_s` is the CPU time that it took meanwhile, seconds; 0 where that cannot be read."""
        super().__init__(f"no answer; it took {cpu_s:.3g} s of CPU time")
        self.cpu_s = cpu_s


class Child:
    """One process, started when it is first needed and again after it was killed."""

    def __init__(self, module: str, *arguments: str, max_line_bytes: int) -> None:
        """`python -m module arguments`; answers have at most `max_line_bytes`."""
        self._command = (sys.executable, "-m", module, *arguments)
        self._max_line_bytes = max_line_bytes
        self._process: Process | None = None

    async def ask(self, request: dict[str, Any], *, timeout_s: float, deadline_s: float) -> Any:
        """The child's answer. Cancelling kills it, since its late answer would be taken for the next one's.

        Raises:
            ChildTimeoutError: None came within `timeout_s`, START_TIMEOUT_S more where it has to be started, or by
                `deadline_s` of the event loop's clock.
            ChildEndedError: It ended.
        """
        timeout_s += START_TIMEOUT_S if self._process is None else 0.0
        line = b""
        before_s = self._cpu_s()
        try:
            async with asyncio.timeout_at(min(deadline_s, asyncio.get_running_loop().time() + timeout_s)):
                line = await self._exchange(request)
        except TimeoutError as error:
            raise ChildTimeoutError(self._cpu_s() - before_s) from error
        except (BrokenPipeError, ConnectionResetError, ValueError, RuntimeError):
            # RuntimeError: uvloop's, for the pipe of a process that has ended.
            line = b""
        finally:
            status = None if line else await self.stop()
        if not line:
            raise ChildEndedError(f"it ended with status {status}")
        return json.loads(line)

    async def stop(self) -> int | None:
        """Kill it, if it is there; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    def _cpu_s(self) -> float:
        if self._process is None:
            return 0.0
        try:
            found = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK")

    async def _exchange(self, request: dict[str, Any]) -> bytes:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=self._max_line_bytes
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline()


class Children:
    """Equal children, each lent to one task at a time."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._idle: asyncio.Queue[Child] = asyncio.Queue()
        for child in children:
            self._idle.put_nowait(child)

    @asynccontextmanager
    async def lent(self, *, deadline_s: float) -> AsyncIterator[Child]:
        """One of them, once it is free. Raises TimeoutError: none was by then, by the event loop's clock."""
        async with asyncio.timeout_at(deadline_s):
            child = await self._idle.get()
        try:
            yield child
        finally:
            self._idle.put_nowait(child)

    async def stop(self) -> None:
        """Kill all."""
        await asyncio.gather(*(child.stop() for child in self._children))
