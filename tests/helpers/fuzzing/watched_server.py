"""A server in a process of its own, whose memory and log can be looked at."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

PORTS = "ports"
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class WatchedServer:
    """One that runs."""

    pid: int
    ports: tuple[int, ...]
    log: Path
    """All that it wrote; complete once it has ended."""

    @property
    def rss_bytes(self) -> int:
        """Its memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@asynccontextmanager
async def watched_server(module: str, folder: Path, *arguments: str) -> AsyncIterator[WatchedServer]:
    """Run a module that writes a line "ports N...", and ends well when its input does; asserts that it does."""
    path = folder / "server.log"
    with path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while not (line := await process.stdout.readline()).startswith(PORTS.encode()):
            assert line, path.read_text()
        reader = asyncio.create_task(_keep(process.stdout, path))
        yield WatchedServer(process.pid, tuple(map(int, line.split()[1:])), path)
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), _END_S) == 0
        await reader
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _keep(stream: asyncio.StreamReader, path: Path) -> None:
    with path.open("ab") as file:
        while block := await stream.read(65536):
            file.write(block)
