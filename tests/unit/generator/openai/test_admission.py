"""How far agents may run ahead of the trainer."""

from __future__ import annotations

import asyncio

import pytest

from penstock.v1 import broker_pb2
from services.generator.openai.sessions import session_admission as openai_room
from services.generator.openai.sessions.session_admission import SessionAdmission, Transit, has_room


def limits(**changes):
    return broker_pb2.RunLimits(**({"groups_per_step": 2, "group_size": 4, "max_staleness": 1} | changes))


@pytest.mark.parametrize(
    ("version", "num_begun", "expected"), [(0, 3, True), (0, 4, False), (1, 5, True), (1, 6, False)]
)
def test_groups_begin_as_far_as_the_staleness_bound_has_use_for_them(version, num_begun, expected):
    run = broker_pb2.GetRunResponse(limits=limits(), policy_version=9)
    assert has_room(run, version=version, num_begun=num_begun) is expected


class Books:
    def __init__(self):
        self.num_samples = 0
        self.num_calls = 0

    async def get_run(self):
        self.num_calls += 1
        audit = broker_pb2.Audit(trained=self.num_samples, in_flight=0)
        return broker_pb2.GetRunResponse(limits=limits(), policy_version=9, audit=audit)


async def waits(room, **changes):
    """Whether it lets nobody in."""
    try:
        async with asyncio.timeout(0.05):
            await room.wait(**({"num_held": lambda: 0, "is_needed": lambda: True} | changes))
    except TimeoutError:
        return True
    return False


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(openai_room, "POLL_S", 0.001)
    books, transit = Books(), Transit()
    return books, transit, SessionAdmission(books.get_run, version=lambda: 0, transit=transit, monotonic_s=lambda: 0.0)


async def test_what_is_held_here_on_its_way_or_in_the_books_counts(bench):
    _, transit, room = bench
    assert not await waits(room, num_held=lambda: 3)
    assert await waits(room, num_held=lambda: 4)
    transit.num_taken = 3
    assert not await waits(room)
    assert await waits(room, num_held=lambda: 1)


async def test_the_books_count_in_samples(monkeypatch):
    books = Books()
    books.num_samples = 13  # four groups, one of them small
    room = SessionAdmission(books.get_run, version=lambda: 0, transit=Transit(), monotonic_s=lambda: 0.0)
    assert await waits(room)
    books.num_samples = 12
    later = SessionAdmission(books.get_run, version=lambda: 0, transit=Transit(), monotonic_s=lambda: 0.0)
    assert not await waits(later)


async def test_who_needs_no_room_any_more_waits_no_longer_and_many_ask_once(bench):
    books, _, room = bench
    assert not await waits(room, num_held=lambda: 9, is_needed=lambda: False)
    assert books.num_calls == 0
    await asyncio.gather(*(waits(room, num_held=lambda: 9) for _ in range(20)))
    assert books.num_calls == 1
