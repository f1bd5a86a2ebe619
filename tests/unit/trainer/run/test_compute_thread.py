"""The compute thread."""

import asyncio
import threading

import numpy as np
import pytest

from penstock.clock import SystemClock
from services.trainer.batches.packing import pack_trajectories
from services.trainer.compute.compute_thread import ComputeThread, InterruptedComputeError, InterruptibleBackend
from tests.unit.trainer.builders import RecordingBackend, build_trajectory


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


def test_an_interrupted_backend_begins_no_forward_pass():
    backend = InterruptibleBackend(RecordingBackend())
    backend.interrupt()
    with pytest.raises(InterruptedComputeError):
        backend.forward_backward(None)


def test_an_interruption_between_the_optimiser_steps_of_a_batch_waits_for_the_last():
    trajectory = build_trajectory(np.random.default_rng(0), num_prompt=2, num_completion=3)
    (pack,) = pack_trajectories([trajectory], max_pack_tokens=16)
    backend = InterruptibleBackend(RecordingBackend())
    backend.optimizer_step(divisor=1, is_last=False)
    backend.interrupt()
    assert backend.forward_backward(pack).num_tokens == 3
    backend.optimizer_step(divisor=1, is_last=True)
    for passes in (backend.forward_backward, backend.forward_logprobs):
        with pytest.raises(InterruptedComputeError):
            passes(pack)
