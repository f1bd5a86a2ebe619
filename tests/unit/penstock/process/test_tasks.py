"""Tasks that must not be cut short, loops beside work, stopping, and the first of several."""

import asyncio

import pytest

from penstock.process.tasks import race, run_beside, uninterrupted, unless_set


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


async def test_the_first_of_several_to_end_ends_the_others_but_a_shielded_one():
    ended = []

    async def endless(name):
        try:
            await forever()
        finally:
            ended.append(name)

    async def three():
        await asyncio.sleep(0)
        return 3

    shielded = asyncio.ensure_future(endless("shielded"))
    assert await race(endless("other"), three(), asyncio.shield(shielded)) == 3
    assert ended == ["other"]
    with pytest.raises(SomeError):
        await race(endless("another"), fail(), three())
    assert ended == ["other", "another"]
    assert not shielded.done()
    shielded.cancel()


async def test_of_two_that_end_at_once_the_first_one_named_counts():
    done, other = (asyncio.get_running_loop().create_future() for _ in range(2))
    done.set_result(1)
    other.set_result(2)
    assert await race(other, done) == 2
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(SomeError())
    with pytest.raises(SomeError):
        await race(failed, done)
    assert await race(done, failed) == 1
