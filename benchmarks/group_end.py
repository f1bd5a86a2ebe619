"""Runs benchmark processes that start others, which the kernel would not end with the benchmark."""

from __future__ import annotations

import asyncio
import os
import signal
import sys


async def run_group(module: str, *arguments: str, timeout_s: float) -> None:
    """Run a module that calls `end_group_with_parent`, as the leader of its own group, to its end.

    Raises:
        RuntimeError: It failed; includes the end of its output.
        TimeoutError: It took longer than `timeout_s`; the whole group is killed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except BaseException:
        # With the processes it started, which would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{module} failed:\n{output.decode(errors='replace')[-4000:]}")
