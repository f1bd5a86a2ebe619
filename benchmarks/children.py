"""Runs child processes of a benchmark, each in its own group, which ends whole with the benchmark."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.process.bound_child import bound

STOP_TIMEOUT_S = 60.0
_TAIL_CHARACTERS = 3000
ROOT = Path(__file__).resolve().parents[1]


def environment(*, num_threads: int) -> dict[str, str]:
    """Environment of a computing side: this many threads, this checkout first, no downloads."""
    threads = str(num_threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
    }


@asynccontextmanager
async def child(
    *command: str, log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process whose output goes to `log`; stopped at the end, by SIGINT first and then with its whole group."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *bound(*command, ends_by=signal.SIGTERM),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def run_child(
    *command: str, timeout_s: float, what: str, log: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: It failed or took longer than `timeout_s`; names `what` and the end of its output.
    """
    log = log or Path(os.devnull)
    process = None
    try:
        async with asyncio.timeout(timeout_s), child(*command, log=log, env=env) as process:
            await process.wait()
    except TimeoutError as error:
        raise RuntimeError(f"{what}: took longer than {timeout_s:g} s\n{tail(log)}") from error
    if process.returncode:
        raise RuntimeError(f"{what}: ended with status {process.returncode}\n{tail(log)}")


def tail(log: Path) -> str:
    """The end of a log, for an error message."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return text[-_TAIL_CHARACTERS:]
