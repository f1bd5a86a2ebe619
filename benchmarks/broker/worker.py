"""A worker process: reads a role as a line of JSON, says that it is ready, plays when told to, reports; and again.

With `--plain` as Python and the C library are by default; without, tuned as Penstock's own processes are.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from penstock.memory import keep_large_buffers
from penstock.telemetry import configure_logging

Ready = Callable[[], Awaitable[None]]
"""To be awaited once a role is set up: returns when everybody is."""


async def _play() -> None:
    loop = asyncio.get_running_loop()

    async def read() -> dict[str, Any] | None:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    async def ready() -> None:
        _write({"ready": {}})
        await read()

    while (message := await read()) is not None:
        module, _, name = message["role"].partition(":")
        role = getattr(importlib.import_module(f"benchmarks.broker.{module}"), name)
        _write({"result": await role(ready, **message["arguments"])})


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # To stderr: stdout is for answers only.
    configure_logging("worker", level="warning")
    if "--plain" in sys.argv[1:]:
        asyncio.run(_play())
    else:
        keep_large_buffers()
        uvloop.run(_play())
