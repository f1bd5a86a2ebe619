"""Contents over real gloo to receivers that come, go, hang and die: every byte checked, nobody waits for long."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.collective.broadcast_backend import Transport
from penstock.collective.group import BroadcastGroup
from penstock.collective.place import BroadcastError
from services.trainer.publishing import broadcasts as broadcasts_module
from tests.helpers.waiting import until
from tests.helpers.weights.broadcasting import CHUNK_BYTES, Origin, Receiver, broadcasting

pytestmark = pytest.mark.slow

pytest.importorskip("torch")
HANG_S = 600.0


@pytest.fixture
async def origin(tmp_path):
    async with broadcasting(tmp_path, stall_s=2.0) as made:
        yield made


def groups_formed() -> float:
    return broadcasts_module.GROUPS_FORMED._value.get()


async def fetch_all(origin: Origin, version: int, receivers: list[Receiver], **settings) -> None:
    manifest = origin.publish(version, **settings)
    await asyncio.gather(*(receiver.fetch(manifest) for receiver in receivers))
    sent = (origin.folder / f"v{version}").read_bytes()
    assert all(receiver.content(version) == sent for receiver in receivers)


async def test_one_broadcast_brings_a_version_to_all_receivers_and_nothing_is_fetched(origin):
    receivers = [await origin.receiver(f"x{index}") for index in range(3)]
    # More than two pieces, the last one short.
    size_bytes = 2 * broadcasts_module.MIN_PIECE_BYTES + 12_345
    await fetch_all(origin, 1, receivers, size_bytes=size_bytes)
    for receiver in receivers:
        assert (receiver.outcomes, receiver.http_bytes) == (["ok"], 0)
        assert receiver.num_received > size_bytes


async def test_a_group_is_used_again_until_a_member_leaves_or_joins(origin):
    first, second, third = [await origin.receiver(name) for name in ("a", "b", "c")]
    before = groups_formed()
    await fetch_all(origin, 1, [first, second, third])
    await fetch_all(origin, 2, [first, second, third])
    assert groups_formed() == before + 1
    await second.leave()
    await fetch_all(origin, 3, [first, third])
    fourth = await origin.receiver("d")
    await fetch_all(origin, 4, [first, third, fourth])
    assert groups_formed() == before + 3
    assert first.outcomes == ["ok"] * 4
    assert sum(receiver.http_bytes for receiver in (first, second, third, fourth)) == 0


async def test_who_is_waited_for_in_vain_fetches_later_and_is_not_waited_for_again(tmp_path):
    async with broadcasting(tmp_path, gather_s=0.5) as origin:
        punctual, late = await origin.receiver("punctual"), await origin.receiver("late")
        await fetch_all(origin, 1, [punctual])
        assert origin.broadcasts._attendance.expected(now_s=time.monotonic()) == {"punctual"}
        await fetch_all(origin, 2, [punctual])
        manifest = origin.publish(3)
        await punctual.fetch(manifest)
        await late.fetch(manifest)
        assert (late.outcomes, late.http_bytes) == ([], manifest.size_bytes)
        # It asked, if too late: the next broadcast waits for it.
        await fetch_all(origin, 4, [punctual, late])
        assert punctual.outcomes == ["ok"] * 4
        assert late.outcomes == ["ok"]


async def test_a_receiver_that_hangs_in_a_broadcast_ends_it_in_time_and_the_others_fetch(tmp_path, monkeypatch):
    async with broadcasting(tmp_path, stall_s=1.0) as origin:
        receivers = [await origin.receiver(name) for name in ("a", "b", "c")]
        await fetch_all(origin, 1, receivers)
        hung = receivers[1].broadcasts._group
        receive = BroadcastGroup.receive

        def hanging(group, size_bytes):
            if group is hung:
                hung._aborted.wait(HANG_S)
                raise BroadcastError("it hung")
            yield from receive(group, size_bytes)

        monkeypatch.setattr(BroadcastGroup, "receive", hanging)
        manifest = origin.publish(2, size_bytes=40_000_000)
        hanging_fetch = asyncio.create_task(receivers[1].fetch(manifest))
        await asyncio.gather(receivers[0].fetch(manifest), receivers[2].fetch(manifest))
        # They did not wait for it.
        assert not hanging_fetch.done()
        sent = (origin.folder / "v2").read_bytes()
        for other in (receivers[0], receivers[2]):
            assert other.outcomes == ["ok", "failed"]
            assert other.content(2) == sent
            # What had come is not fetched again.
            assert other.http_bytes + other.num_received <= len(sent) + len((origin.folder / "v1").read_bytes())
        monkeypatch.setattr(BroadcastGroup, "receive", receive)
        await fetch_all(origin, 3, [receivers[0], receivers[2]])
        assert receivers[0].outcomes == ["ok", "failed", "ok"]
        hung.abort()
        await hanging_fetch
        # It is left out for a while, but gets its versions.
        assert receivers[1].content(2) == sent
        await fetch_all(origin, 4, receivers)
        assert receivers[1].outcomes[1:] == ["failed"]


async def test_a_byte_flipped_on_the_way_is_refused_and_that_chunk_alone_is_fetched(origin, monkeypatch):
    receivers = [await origin.receiver(name) for name in ("a", "b")]
    receive = BroadcastGroup.receive

    def flipping(group, size_bytes):
        for piece in receive(group, size_bytes):
            if group.place.rank == 1:
                piece[100_000] ^= 1
            yield piece

    monkeypatch.setattr(BroadcastGroup, "receive", flipping)
    await fetch_all(origin, 1, receivers)
    assert [len(receiver.refused) for receiver in receivers] == [1, 0]
    assert [receiver.http_bytes for receiver in receivers] == [CHUNK_BYTES, 0]
    assert "digest" in str(receivers[0].refused[0])


async def test_a_receiver_of_another_library_fetches(origin):
    receiver = await origin.receiver("a", backend=Transport.NCCL)
    await fetch_all(origin, 1, [receiver])
    assert (receiver.outcomes, receiver.num_received) == ([], 0)


async def test_a_fetch_that_is_cancelled_in_a_broadcast_leaves_nothing_behind(origin, monkeypatch):
    receivers = [await origin.receiver(name) for name in ("a", "b")]
    await fetch_all(origin, 1, receivers)
    manifest = origin.publish(2, size_bytes=80_000_000)
    cancelled = asyncio.create_task(receivers[0].fetch(manifest))
    other = asyncio.create_task(receivers[1].fetch(manifest))
    await until(lambda: receivers[0].num_received > 4_000_000)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert cancelled.cancelled()
    await other
    assert receivers[1].content(2) == (origin.folder / "v2").read_bytes()
    assert receivers[1].outcomes == ["ok", "failed"]
    # The word of the one that left says whose fault it was.
    await fetch_all(origin, 3, [receivers[1]])
    assert receivers[1].outcomes == ["ok", "failed", "ok"]
