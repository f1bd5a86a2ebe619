"""The compute thread."""

import asyncio
import threading

import pytest

from penstock.clock import SystemClock
from services.trainer.compute.compute_thread import ComputeThread


async def test_the_compute_thread_ends_its_call_before_a_cancelled_caller_ends():
    spans, entered, go_on = [], threading.Event(), threading.Event()
    compute = ComputeThread(clock=SystemClock(), on_span=lambda start, end: spans.append((start, end)))

    def work():
        entered.set()
        assert go_on.wait(5)

    task = asyncio.create_task(compute.run(work))
    assert await asyncio.to_thread(entered.wait, 5)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(spans) == 1
    compute.close()
