"""Time limits: a block ends when its time is up and for no other reason; an event is waited for again and again."""

import asyncio

import pytest
import uvloop

from penstock.process.time_limits import TimeLimit, Wake


async def test_a_block_that_takes_too_long_ends_with_a_timeout():
    with pytest.raises(TimeoutError), TimeLimit(0.001):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_the_cancellation_of_others_is_no_timeout():
    entered = asyncio.Event()

    async def work():
        with TimeLimit(60.0):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_beside_a_timeout_is_not_lost():
    async def work():
        with TimeLimit(0.0):
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_block_ended_in_time_is_not_cancelled_later():
    with TimeLimit(0.0):
        pass
    await asyncio.sleep(0.001)


async def test_a_wake_is_taken_once():
    wake = Wake()
    wake.set()
    assert await wake.take_within(60.0)
    assert not await wake.take_within(0.001)


async def test_a_wake_ends_a_wait():
    wake = Wake()
    waiting = asyncio.create_task(wake.take_within(60.0))
    await asyncio.sleep(0)
    wake.set()
    assert await waiting
    assert not wake.is_set()


async def test_each_wait_has_its_own_limit():
    wake, loop = Wake(), asyncio.get_running_loop()
    assert not await wake.take_within(0.001)
    loop.call_soon(wake.set)
    assert await wake.take_within(60.0)
    # Shorter than the one before, whose timer is still set.
    assert not await wake.take_within(0.001)
    loop.call_soon(wake.set)
    assert await wake.take_within(0.01)
    # Longer: the timer of the one before is due first, and ends nothing.
    loop.call_later(0.02, wake.set)
    assert await wake.take_within(60.0)


async def test_a_cancelled_wait_leaves_the_event_to_the_next():
    wake = Wake()
    waiting = asyncio.create_task(wake.take_within(60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    wake.set()
    assert await wake.take_within(60.0)


def test_limits_that_are_over_at_once_work_on_uvloop():
    async def main() -> None:
        wake = Wake()
        for _ in range(2):
            # Set before the timer rings, which stays set for the next wait.
            asyncio.get_running_loop().call_soon(wake.set)
            assert await wake.take_within(0.0)
        assert not await wake.take_within(0.0)
        with TimeLimit(0.0) as limit:
            assert limit.end_s is not None
            limit.reschedule(None)

    uvloop.run(main())
