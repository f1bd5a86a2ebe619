"""A group forms within its deadline or not at all, also where the library blocks for ever."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from penstock.collective.broadcast_backend import Transport
from penstock.collective.forming import meet, within
from penstock.collective.place import BroadcastError, GroupPlace

TIMEOUT_S = 20.0


def place(rank: int, *, stall_s: float) -> GroupPlace:
    return GroupPlace(group_id="g", rank=rank, num_ranks=2, backend=Transport.NCCL, stall_s=stall_s, piece_bytes=1024)


def never_late() -> None:
    raise AssertionError("nothing was late")


def test_what_is_in_time_is_returned_and_what_fails_is_raised():
    assert within(TIMEOUT_S, lambda: 7, what="w", on_late=never_late) == 7
    with pytest.raises(ZeroDivisionError):
        within(TIMEOUT_S, lambda: 1 / 0, what="w", on_late=never_late)


def test_what_blocks_is_left_behind_and_reported_should_it_ever_end():
    ended, told = threading.Event(), threading.Event()
    with pytest.raises(BroadcastError, match=r"connecting took more than 0\.05 s"):
        within(0.05, ended.wait, what="connecting", on_late=told.set)
    assert not told.is_set()
    ended.set()
    assert told.wait(TIMEOUT_S)


@pytest.fixture
def stores():
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return [distributed.PrefixStore("g", store) for store in (server, client)]


def test_members_meet(stores):
    met = threading.Event()

    def second() -> None:
        meet(stores[1], place(1, stall_s=TIMEOUT_S))
        met.set()

    threading.Thread(target=second).start()
    meet(stores[0], place(0, stall_s=TIMEOUT_S))
    assert met.wait(TIMEOUT_S)


def test_a_member_that_does_not_come_is_not_waited_for_longer_than_the_deadline(stores):
    with pytest.raises(BroadcastError, match="not all 2 members came"):
        meet(stores[0], place(0, stall_s=0.1))
