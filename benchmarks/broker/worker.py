"""Runs a worker process: reads a role as a line of JSON, reports readiness, plays on request, reports; and repeats.

With `--plain` it uses the defaults of Python and the C library, with `--foreign` also a Python without Penstock;
without either it is tuned like Penstock's own processes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TextIO

Ready = Callable[[], Awaitable[None]]
"""Await once a role is set up: returns when all workers are."""


async def _play(answers: TextIO) -> None:
    loop = asyncio.get_running_loop()

    async def read() -> dict[str, Any] | None:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    async def ready() -> None:
        write({"ready": {}})
        await read()

    while (message := await read()) is not None:
        module, _, name = message["role"].partition(":")
        # One that does not say where it is lives beside this file.
        place = module if module.startswith("benchmarks.") else f"benchmarks.broker.{module}"
        role = getattr(importlib.import_module(place), name)
        write({"result": await role(ready, **message["arguments"])})


def _answers() -> TextIO:
    """Standard output, for answers only: everything else printed goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _main(kind: str) -> None:
    if kind == "--foreign":
        asyncio.run(_play(_answers()))
        return
    # Imported here because other environments lack them.
    import uvloop

    from penstock.memory.malloc import keep_large_buffers
    from penstock.process.log_setup import configure_logging

    configure_logging("worker", level="warning")
    if kind == "--plain":
        asyncio.run(_play(_answers()))
    else:
        keep_large_buffers()
        uvloop.run(_play(_answers()))


if __name__ == "__main__":
    _main(sys.argv[1] if len(sys.argv) > 1 else "")
