"""Lease and token sessions against a scripted broker, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.clients import leases, sample_stream, tokens
from penstock.clients.leases import LeaseSession
from penstock.clients.tokens import TokenSession
from penstock.errors import BadTokenError
from penstock.network.connection import Connection
from penstock.network.rpc import open_channel
from penstock.security import Security
from penstock.v1 import broker_pb2, types_pb2
from tests.helpers.brokers.scripted_generation import ScriptedGenerationBroker, prompt
from tests.helpers.serving import serving
from tests.helpers.waiting import until


class Holder:
    """Takes whatever comes, up to its slots."""

    def __init__(self, *, num_slots=2):
        self.num_slots = num_slots
        self.leases = {}
        self.revoked = []
        self.num_closed = 0
        self.owners = []

    def num_free_slots(self):
        return self.num_slots - len(self.leases)

    def beat(self):
        return broker_pb2.GeneratorBeat(policy_version=0, active_lease_ids=list(self.leases))

    def lease(self, lease):
        self.leases[lease.lease_id] = lease

    def revoke(self, revocation):
        self.revoked.append(revocation.lease_id)

    def owned_by(self, owner):
        self.owners.append(owner)

    def run_closed(self):
        self.num_closed += 1


class Listener:
    def __init__(self):
        self.heard = []

    def settled(self):
        self.heard.append("settled")

    def refused(self, error):
        self.heard.append((error.reason, error.next_offset))


@asynccontextmanager
async def running(coroutine):
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def leasing(holder, broker):
    async with serving(broker.service()) as (_, target), open_channel(target) as channel:
        hello = broker_pb2.GeneratorHello(run_id="r", generator_id="gen-1", max_context_tokens=64)
        session = LeaseSession(Connection(channel), hello=hello, handler=holder)
        async with running(session.run()):
            yield session


@asynccontextmanager
async def sending(broker, *, flush_interval_s=0.02):
    async with serving(broker.service()) as (_, target), open_channel(target) as channel:
        session = TokenSession(Connection(channel), run_id="r", generator_id="gen-1", flush_interval_s=flush_interval_s)
        async with running(session.run()):
            yield session


def open_stream(session, broker, group_id="g"):
    """A leased sample and the stream of its tokens."""
    (sample,) = broker.submit(prompt(group_id))
    lease = broker._lease("gen-1")
    listener = Listener()
    return sample, session.open(lease.key, lease_id=lease.lease_id, offset=0, listener=listener), listener


def append(stream, *token_ids, version=0):
    ids = np.asarray(token_ids, np.int32)
    stream.append(ids, np.full(len(ids), -0.5, np.float32), policy_version=version)


async def test_no_more_leases_come_than_there_are_slots_and_freed_slots_bring_more():
    broker, holder = ScriptedGenerationBroker(), Holder(num_slots=2)
    broker.submit(prompt(group_size=5))
    async with leasing(holder, broker) as session:
        await until(lambda: len(holder.leases) == 2)
        await until(lambda: any(len(beat.active_lease_ids) == 0 for beat in broker.beats))
        session.notify()
        await until(lambda: broker.beats[-1].active_lease_ids == list(holder.leases))
        assert broker.beats[-1].credit_total == 2
        del holder.leases[next(iter(holder.leases))]
        session.notify()
        await until(lambda: len(holder.leases) == 2 and broker.beats[-1].credit_total == 3)


async def test_a_reconnect_keeps_id_and_leases_and_counts_credits_again():
    broker, holder = ScriptedGenerationBroker(), Holder(num_slots=3)
    broker.submit(prompt(group_size=2))
    async with leasing(holder, broker):
        await until(lambda: len(holder.leases) == 2)
        num_beats = len(broker.beats)
        broker.break_lease_stream()
        await until(lambda: len(broker.hellos) == 2 and len(broker.beats) > num_beats)
        assert broker.hellos[0] == broker.hellos[1]
        assert set(broker.beats[-1].active_lease_ids) == set(holder.leases)
        assert broker.beats[-1].credit_total == 1


async def test_an_unknown_run_is_tried_again_until_it_is_opened():
    broker, holder = ScriptedGenerationBroker(), Holder()
    broker.is_known = False
    broker.submit(prompt())
    async with leasing(holder, broker) as session:
        await until(lambda: "no such run" in session.waiting_reason)
        broker.is_known = True
        await until(lambda: len(holder.leases) == 1)


async def test_revocations_and_the_end_of_the_run_reach_the_holder():
    broker, holder = ScriptedGenerationBroker(), Holder()
    broker.submit(prompt())
    async with leasing(holder, broker) as session:
        await until(lambda: len(holder.leases) == 1)
        broker.revoke("g-0-1")
        await until(lambda: holder.revoked == ["g-0-1"])
        broker.is_closed = True
        await until(lambda: holder.num_closed >= 1)
        assert session.waiting_reason.startswith("run closed")


async def test_a_silent_broker_is_left_and_found_again(monkeypatch):
    monkeypatch.setattr(leases, "MAX_SILENCE_S", 0.1)
    broker, holder = ScriptedGenerationBroker(), Holder()
    async with leasing(holder, broker):
        await until(lambda: len(broker.hellos) >= 2)


async def test_a_stream_that_waits_in_line_holds_one_heartbeat(monkeypatch):
    """Others would be read before those that name what it gets, each for what it takes to read one."""
    monkeypatch.setattr(leases, "BEAT_INTERVAL_S", 0.1)
    broker, holder = ScriptedGenerationBroker(), Holder()
    broker.is_served.clear()
    async with leasing(holder, broker) as session:
        await until(lambda: len(broker.beats) == 1)
        for _ in range(5):
            session.notify()
            await asyncio.sleep(0.1)
        assert len(broker.beats) == 1
        broker.submit(prompt())
        broker.is_served.set()
        await until(lambda: len(broker.beats) > 3)
        assert list(broker.beats[-1].active_lease_ids) == list(holder.leases) != []


async def test_a_busy_broker_gets_fewer_heartbeats_until_it_asks_no_more(monkeypatch):
    waits = []

    async def no_change(_event, timeout_s):
        waits.append(timeout_s)
        await asyncio.sleep(0.001)

    monkeypatch.setattr(leases, "set_within", no_change)
    broker, holder = ScriptedGenerationBroker(), Holder()
    async with leasing(holder, broker) as session:
        await until(lambda: waits == [pytest.approx(2.0 - 0.05)] * 2)
        broker.heartbeat_interval = Duration(seconds=3)
        await until(lambda: waits[-1] == pytest.approx(3.0 - 0.25))
        for wild in (Duration(seconds=2**62), Duration(seconds=9, nanos=-(2**31))):
            broker.heartbeat_interval = wild
            await until(lambda: session.beat_interval_s == 4.5)
        for nothing in (None, Duration(seconds=-(10**12)), Duration(seconds=1), Duration(seconds=3, nanos=-(2**31))):
            broker.heartbeat_interval = Duration(seconds=3)
            await until(lambda: session.beat_interval_s == 3.0)
            broker.heartbeat_interval = nothing
            await until(lambda: session.beat_interval_s == 2.0)


async def test_what_a_broker_asked_for_ends_with_its_stream():
    broker, holder = ScriptedGenerationBroker(), Holder()
    broker.heartbeat_interval = Duration(seconds=4)
    async with leasing(holder, broker) as session:
        await until(lambda: session.beat_interval_s == 4.0)
        broker.is_known = False
        broker.break_lease_stream()
        await until(lambda: session.beat_interval_s == 2.0)


async def test_a_wrong_token_ends_the_session():
    broker = ScriptedGenerationBroker()
    async with (
        serving(broker.service(), security=Security(token="right", allows_plain=True)) as (_, target),
        open_channel(target, Security(token="wrong", allows_plain=True)) as channel,
    ):
        hello = broker_pb2.GeneratorHello(run_id="r", generator_id="gen-1")
        session = LeaseSession(Connection(channel), hello=hello, handler=Holder())
        with pytest.raises(BadTokenError):
            async with asyncio.timeout(5):
                await session.run()


async def test_tokens_of_many_samples_share_a_request():
    broker = ScriptedGenerationBroker()
    async with sending(broker) as session:
        made = [open_stream(session, broker, f"g{index}") for index in range(20)]
        for _, stream, _ in made:
            append(stream, 1, 2)
            append(stream, 3, version=1)
            stream.finish(types_pb2.FINISH_REASON_STOP, text="t")
        await until(lambda: all(listener.heard == ["settled"] for _, _, listener in made))
    assert len(broker.requests) == 1
    assert all(sample.token_ids == [1, 2, 3] for sample, _, _ in made)
    assert all(sample.versions == [0, 0, 1] for sample, _, _ in made)


async def test_a_request_leaves_early_once_enough_has_come_together():
    broker = ScriptedGenerationBroker()
    async with sending(broker, flush_interval_s=10.0) as session:
        sample, stream, _ = open_stream(session, broker)
        append(stream, *range(tokens.TARGET_REQUEST_BYTES // 8))
        await until(lambda: len(sample.token_ids) == tokens.TARGET_REQUEST_BYTES // 8, timeout_s=5)


async def test_a_busy_broker_gets_larger_chunks_until_it_asks_no_more():
    broker = ScriptedGenerationBroker()
    broker.flush_interval = Duration(seconds=5)
    async with sending(broker) as session:
        sample, stream, _ = open_stream(session, broker)
        append(stream, 1)
        await until(lambda: session.flush_interval_s == 5.0)
        few, many = tokens.TARGET_REQUEST_BYTES // 8, tokens.MAX_BUFFERED_BYTES // 16
        append(stream, *[2] * few)
        for _ in range(5):
            await asyncio.sleep(0)
        assert stream.buffered_bytes == tokens.TARGET_REQUEST_BYTES
        append(stream, *[2] * (many - few))
        await until(lambda: len(sample.token_ids) == 1 + many, timeout_s=4)
        assert len(broker.requests[1].chunks[0].token_ids) // 4 == sample_stream.MAX_TOKENS_PER_CHUNK
        broker.flush_interval = None
        append(stream, 4)
        assert await session.flush(timeout_s=4)
        assert session.flush_interval_s == 0.02


async def test_flush_sends_at_once_and_waits_for_the_receipt():
    broker = ScriptedGenerationBroker()
    async with sending(broker, flush_interval_s=10.0) as session:
        sample, stream, _ = open_stream(session, broker)
        append(stream, 1)
        assert await session.flush(timeout_s=5)
        assert sample.token_ids == [1]
        broker.is_acknowledging = False
        append(stream, 2)
        assert not await session.flush(timeout_s=0.1)


async def test_requests_without_receipt_are_sent_again_after_a_break_and_stored_once():
    broker = ScriptedGenerationBroker()
    broker.num_stream_breaks = 2
    async with sending(broker) as session:
        sample, stream, listener = open_stream(session, broker)
        for token_id in range(6):
            append(stream, token_id)
            await until(lambda: not stream.is_dirty)
        stream.finish(types_pb2.FINISH_REASON_LENGTH, text="t")
        await until(lambda: listener.heard == ["settled"])
    assert sample.token_ids == [0, 1, 2, 3, 4, 5]


async def test_a_broker_that_does_not_answer_holds_the_sender_back_with_bounded_memory():
    broker = ScriptedGenerationBroker()
    broker.is_acknowledging = False
    num_accepted = 0
    async with sending(broker, flush_interval_s=0.001) as session:
        sample, stream, _ = open_stream(session, broker)

        async def produce():
            nonlocal num_accepted
            while True:
                if not session.has_room:
                    await session.wait_for_room()
                append(stream, *([7] * 1024))
                num_accepted += 1024
                await asyncio.sleep(0)

        async with running(produce()):
            window = tokens.MAX_UNACKNOWLEDGED
            await until(lambda: not session.has_room and len(session._unacknowledged) == window)
            most_bytes = tokens.MAX_BUFFERED_BYTES + tokens.MAX_UNACKNOWLEDGED * 2**18
            held = num_accepted
            await asyncio.sleep(0.05)
            assert num_accepted == held
            assert held * 8 <= most_bytes
            broker.is_acknowledging = True
            await until(lambda: num_accepted > held)
        assert await session.flush(timeout_s=10)
        assert len(sample.token_ids) == num_accepted


async def test_a_refused_chunk_ends_only_its_own_sample():
    broker = ScriptedGenerationBroker()
    broker.refusals.append(("OFFSET_MISMATCH", 0))
    async with sending(broker) as session:
        _, first, heard_by_first = open_stream(session, broker, "g0")
        sample, second, heard_by_second = open_stream(session, broker, "g1")
        append(first, 1)
        append(second, 2)
        await until(lambda: heard_by_first.heard == [("OFFSET_MISMATCH", 0)])
        append(first, 3)
        append(second, 4)
        second.finish(types_pb2.FINISH_REASON_STOP, text="t")
        await until(lambda: heard_by_second.heard == ["settled"])
    assert sample.token_ids == [2, 4]


async def test_tokens_of_a_closed_run_are_given_up_and_the_session_goes_on():
    broker = ScriptedGenerationBroker()
    broker.is_closed = True
    async with sending(broker) as session:
        _, stream, listener = open_stream(session, broker)
        append(stream, 1)
        await until(lambda: listener.heard == [("RUN_CLOSED", 0)])
        broker.is_closed = False
        sample, stream, _ = open_stream(session, broker, "again")
        append(stream, 2)
        await until(lambda: sample.token_ids == [2])


async def test_an_idle_stream_is_closed_and_opened_again_when_needed(monkeypatch):
    monkeypatch.setattr(tokens, "MAX_SILENCE_S", 0.05)
    broker = ScriptedGenerationBroker()
    async with sending(broker, flush_interval_s=0.001) as session:
        sample, stream, _ = open_stream(session, broker)
        append(stream, 1)
        await until(lambda: sample.token_ids == [1])
        await asyncio.sleep(0.15)
        append(stream, 2)
        await until(lambda: sample.token_ids == [1, 2])
    assert [request.sequence for request in broker.requests] == [1, 1]
