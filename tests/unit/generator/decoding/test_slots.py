"""Slots at the engine, shared by leased and unleased samples."""

from __future__ import annotations

import asyncio

from services.generator.decoding.slots import Slots


async def start(slots: Slots) -> asyncio.Task[None]:
    task = asyncio.create_task(slots.wait())
    await asyncio.sleep(0)
    return task


async def test_a_freed_place_goes_to_the_guest_that_waited_longest() -> None:
    slots = Slots(1)
    slots.take()
    first, second = await start(slots), await start(slots)
    slots.release()
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (True, False)
    slots.release()
    await asyncio.wait_for(second, timeout=5)
    assert slots.num_free == 0


async def test_waiting_guests_leave_no_place_to_be_asked_for_by_leases() -> None:
    slots = Slots(2)
    slots.take()
    slots.take()
    unleased = await start(slots)
    # A lease too many was on its way when the unleased sample came: it takes a slot, and the sample waits on.
    slots.take()
    slots.release()
    await asyncio.sleep(0)
    assert not unleased.done()
    slots.release()
    await asyncio.wait_for(unleased, timeout=5)
    slots.release()
    assert slots.num_free == 1


async def test_a_guest_that_gives_up_waiting_leaves_its_turn_to_the_next() -> None:
    slots = Slots(1)
    slots.take()
    first, second = await start(slots), await start(slots)
    first.cancel()
    await asyncio.sleep(0)
    assert slots.num_waiting == 1
    slots.release()
    await asyncio.wait_for(second, timeout=5)
    slots.release()
    assert slots.num_free == 1


async def test_a_guest_cancelled_as_it_gets_its_place_gives_it_back() -> None:
    slots = Slots(1)
    slots.take()
    unleased = await start(slots)
    slots.release()
    unleased.cancel()
    await asyncio.gather(unleased, return_exceptions=True)
    assert slots.num_free == 1
