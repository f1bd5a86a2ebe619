"""Tasks that must not be cut short, loops beside work, and stopping; and the compute thread built on them."""

import asyncio
import threading

import numpy as np
import pytest

from penstock.clock import SystemClock
from services.trainer.batches.packing import pack_trajectories
from services.trainer.compute.background_tasks import run_beside, uninterrupted, unless_set
from services.trainer.compute.compute_thread import ComputeThread, InterruptedComputeError, InterruptibleBackend
from tests.unit.trainer.builders import RecordingBackend, build_trajectory


class SomeError(Exception):
    pass


async def fail():
    raise SomeError


async def forever():
    await asyncio.Event().wait()


async def test_cancelled_work_that_must_not_be_cut_short_ends_first():
    entered, go_on, ended = asyncio.Event(), asyncio.Event(), []

    async def work():
        entered.set()
        await go_on.wait()
        ended.append(True)

    task = asyncio.create_task(uninterrupted(work()))
    await entered.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_loop_that_fails_ends_the_work_with_its_error():
    with pytest.raises(SomeError):
        await asyncio.wait_for(run_beside(forever(), [fail]), 5)


async def test_loops_end_with_the_work():
    ended = []

    async def loop():
        try:
            await forever()
        finally:
            ended.append(True)

    async def work():
        await asyncio.sleep(0)
        return 3

    assert await run_beside(work(), [loop]) == 3
    assert ended == [True]


async def test_stopping_cancels_the_work_and_an_error_is_raised():
    stop = asyncio.Event()
    task = asyncio.create_task(unless_set(forever(), stop))
    await asyncio.sleep(0)
    stop.set()
    assert await asyncio.wait_for(task, 5) is None
    with pytest.raises(SomeError):
        await unless_set(fail(), asyncio.Event())


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
