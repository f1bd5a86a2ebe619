"""Runs an origin in its own process: the trainer's HTTP server over the files of a folder.

    python -m benchmarks.weights.origin FOLDER

Prints its base address and serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.process.bound_child import bound
from penstock.security import NO_SECURITY
from penstock.transfer.content_server import serving_contents

START_TIMEOUT_S = 30.0


async def serve(folder: Path) -> None:
    def find(_run_id: str, name: str) -> Path | None:
        return {path.name: path for path in folder.iterdir()}.get(name)

    async with serving_contents(find, listen="127.0.0.1:0", setting="listen", security=NO_SECURITY) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def running_origin(folder: Path) -> AsyncIterator[str]:
    """An origin over `folder`; yields its base address."""
    command = bound(sys.executable, "-m", "benchmarks.weights.origin", str(folder), ends_by=signal.SIGKILL)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            url = (await process.stdout.readline()).decode().strip()
        yield url
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
