"""Rollouts over a scripted engine: no sample is lost by an error of its own."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from penstock.clients.sample_stream import SampleStream
from penstock.clock import ManualClock
from penstock.errors import DeadlineError
from penstock.process.busy_time import BusyTracker
from penstock.v1 import broker_pb2, types_pb2
from penstock.v1.weights_pb2 import WeightsManifest
from penstock.wire.codec import int32_array, int32_bytes
from services.generator.decoding import sample_runner
from services.generator.decoding.drain import drained
from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.token_rate import TokenRate
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import EngineStoppedError, FinishReason, RequestRefusedError
from services.generator.engine.model_files import IdText
from services.generator.metrics import GeneratorMetrics
from tests.helpers.generators.scripted_engine import ScriptedEngine, span
from tests.helpers.waiting import until

ABORTED = types_pb2.FINISH_REASON_ABORTED


class FakeTokens:
    """Keeps the streams that were opened; `sent` is what a session would have sent so far."""

    def __init__(self):
        self.streams = []
        self.room = asyncio.Event()
        self.room.set()

    def open(self, key, *, lease_id, offset, listener, token_shard):
        assert token_shard == 0
        stream = SampleStream(key, lease_id=lease_id, offset=offset, listener=listener, on_change=lambda *_: None)
        self.streams.append(stream)
        return stream

    @property
    def has_room(self):
        return self.room.is_set()

    async def wait_for_room(self):
        await self.room.wait()

    async def flush(self, *, timeout_s):
        return True

    def sent(self, index=0):
        return self.streams[index].take_chunk()


class Bench:
    def __init__(self, *, max_concurrent_samples=4, text=None):
        self.engine = ScriptedEngine()
        self.tokens = FakeTokens()
        self.held = AttestedWeights()
        self.busy = BusyTracker(ManualClock())
        self.failures = []
        parts = RolloutParts(
            engine=self.engine,
            tokens=self.tokens,
            held=self.held,
            text=text or IdText(),
            end_token_ids=(2,),
            busy=self.busy,
            metrics=GeneratorMetrics(CollectorRegistry()),
            on_change=lambda: None,
            on_engine_failure=self.failures.append,
        )
        self.rollouts = Rollouts(parts, max_concurrent_samples=max_concurrent_samples)

    def drain(self, *, max_wait_s, tokens_per_second):
        rate = TokenRate()
        rate.tokens_per_second = tokens_per_second
        return drained(self.rollouts, engine=self.engine, rate=rate, max_wait_s=max_wait_s)

    async def hold(self, version=0):
        await self.held.attest(WeightsManifest(policy_version=version, history=0, digest="d"))

    async def begin(self, lease_id="l", *, prefix=(), min_policy_version=0, max_new_tokens=8):
        self.rollouts.begin(
            broker_pb2.Lease(
                lease_id=lease_id,
                key=types_pb2.SampleKey(group_id="g"),
                prompt=types_pb2.Prompt(
                    token_ids=int32_bytes([1]), sampling=types_pb2.SamplingParams(max_new_tokens=max_new_tokens)
                ),
                prefix_token_ids=int32_bytes(prefix),
                min_policy_version=min_policy_version,
            )
        )
        await asyncio.sleep(0)

    async def decoding(self, lease_id="l"):
        await until(lambda: lease_id in self.engine.requests)


@pytest.fixture
async def bench():
    made = Bench()
    await made.hold()
    yield made
    await made.rollouts.give_back_all(flush_timeout_s=0.1)


async def test_the_finish_chunk_carries_prefix_and_new_tokens_as_text(bench):
    await bench.begin(prefix=(7, 8))
    await bench.decoding()
    bench.engine.say("l", span(9))
    bench.engine.say("l", span(2, finish=FinishReason.STOP))
    await until(lambda: bench.rollouts.num_free_slots() == 4)
    chunk = bench.tokens.sent()
    assert chunk.offset == 2
    assert int32_array(chunk.token_ids, "t").tolist() == [9, 2]
    assert (chunk.finish_reason, chunk.text) == (types_pb2.FINISH_REASON_STOP, "7 8 9 2")


async def test_a_lease_is_renewed_until_its_last_chunk_is_stored(bench):
    await bench.begin()
    await bench.decoding()
    bench.engine.say("l", span(2, finish=FinishReason.STOP))
    await until(lambda: bench.rollouts.num_free_slots() == 4)
    assert bench.rollouts.lease_ids == ["l"]
    bench.tokens.streams[0].settle()
    assert bench.rollouts.lease_ids == []


async def test_a_sample_waits_for_the_version_its_lease_asks_for(bench):
    await bench.begin(min_policy_version=3)
    await asyncio.sleep(0)
    assert bench.engine.requests == {}
    await bench.hold(3)
    await bench.decoding()


async def test_a_version_that_never_comes_gives_the_sample_back(bench, monkeypatch):
    monkeypatch.setattr(sample_runner, "MAX_VERSION_WAIT_S", 0.01)
    await bench.begin(min_policy_version=3)
    await until(lambda: bench.rollouts.num_free_slots() == 4)
    assert bench.tokens.sent().finish_reason == ABORTED
    assert bench.failures == []


async def test_a_refused_request_is_given_back_and_the_engine_goes_on(bench):
    await bench.begin()
    await bench.decoding()
    bench.engine.say("l", RequestRefusedError("too long"))
    await until(lambda: bench.rollouts.num_free_slots() == 4)
    assert bench.tokens.sent().finish_reason == ABORTED
    assert bench.failures == []


async def test_a_lease_with_broken_fields_is_given_back(bench):
    await bench.begin(max_new_tokens=0)
    await until(lambda: bench.rollouts.num_free_slots() == 4)
    assert bench.tokens.sent().finish_reason == ABORTED


@pytest.mark.parametrize("error", [EngineStoppedError("died"), KeyError("a bug"), None])
async def test_an_engine_that_fails_gives_the_sample_back_with_its_tokens_and_is_reported(bench, error):
    await bench.begin()
    await bench.decoding()
    bench.engine.say("l", span(5, 6))
    bench.engine.say("l", error)
    await until(lambda: len(bench.failures) == 1)
    chunk = bench.tokens.sent()
    assert chunk.finish_reason == ABORTED
    assert int32_array(chunk.token_ids, "t").tolist() == [5, 6]


async def test_a_revoked_sample_is_aborted_and_nothing_of_it_is_sent(bench):
    await bench.begin()
    await bench.decoding()
    bench.engine.say("l", span(5))
    await until(lambda: bench.tokens.streams[0].is_dirty)
    bench.rollouts.drop("l", "revoked")
    await until(lambda: bench.engine.num_running == 0)
    assert not bench.tokens.streams[0].is_dirty
    assert bench.rollouts.num_free_slots() == 4


async def test_a_lost_lease_is_dropped_silently(bench):
    await bench.begin()
    await bench.decoding()
    bench.tokens.streams[0].refuse(broker_pb2.ChunkError(lease_id="l", reason="LEASE_LOST"))
    await until(lambda: bench.engine.num_running == 0)
    assert len(bench.tokens.streams) == 1
    assert bench.rollouts.lease_ids == []


@pytest.mark.parametrize("reason", ["OFFSET_MISMATCH", "INVALID_FIELD"])
async def test_a_refused_chunk_gives_the_sample_back_from_where_the_broker_has_it(bench, reason):
    await bench.begin()
    await bench.decoding()
    bench.engine.say("l", span(5, 6, 7))
    await until(lambda: bench.tokens.streams[0].is_dirty)
    bench.tokens.streams[0].refuse(broker_pb2.ChunkError(lease_id="l", reason=reason, next_offset=1))
    chunk = bench.tokens.sent(1)
    assert (chunk.lease_id, chunk.offset, chunk.finish_reason) == ("l", 1, ABORTED)
    await until(lambda: bench.engine.num_running == 0)


async def test_a_full_buffer_holds_decoding_back(bench):
    await bench.begin()
    await bench.decoding()
    bench.tokens.room.clear()
    bench.engine.say("l", span(5))
    bench.engine.say("l", span(6))
    await asyncio.sleep(0.01)
    assert bench.tokens.streams[0].num_tokens == 0
    bench.tokens.room.set()
    await until(lambda: bench.tokens.streams[0].num_tokens == 2)


async def test_giving_back_ends_every_sample_and_takes_no_more(bench):
    await bench.begin("a")
    await bench.begin("b", min_policy_version=9)
    await bench.decoding("a")
    bench.engine.say("a", span(5))
    await until(lambda: bench.tokens.streams[0].is_dirty)
    await bench.rollouts.give_back_all(flush_timeout_s=1)
    assert [bench.tokens.sent(i).finish_reason for i in (0, 1)] == [ABORTED, ABORTED]
    assert bench.engine.num_running == 0
    assert bench.rollouts.num_free_slots() == 0
    await bench.begin("late")
    assert bench.tokens.sent(2).finish_reason == ABORTED
    assert "late" not in bench.engine.requests


async def test_no_slot_is_free_while_the_weights_are_in_doubt(bench):
    assert bench.rollouts.num_free_slots() == 4
    bench.held.distrust()
    assert bench.rollouts.num_free_slots() == 0


async def test_the_same_lease_twice_is_decoded_once(bench):
    await bench.begin()
    await bench.begin()
    await bench.decoding()
    assert bench.rollouts.num_free_slots() == 3
    assert len(bench.tokens.streams) == 1


async def test_an_update_can_wait_until_nothing_is_decoded(bench):
    await bench.begin("a")
    await bench.decoding("a")
    inside = asyncio.Event()
    leave = asyncio.Event()

    async def update():
        async with bench.rollouts.decoding.silence(timeout_s=5):
            inside.set()
            await leave.wait()

    task = asyncio.create_task(update())
    await asyncio.sleep(0)
    await bench.begin("b")
    assert not inside.is_set()
    bench.engine.say("a", span(2, finish=FinishReason.STOP))
    await until(inside.is_set)
    assert "b" not in bench.engine.requests
    leave.set()
    await task
    await bench.decoding("b")


async def test_a_sample_that_waits_for_a_drain_is_not_given_back_for_it(bench, monkeypatch):
    monkeypatch.setattr(sample_runner, "MAX_VERSION_WAIT_S", 0.02)
    await bench.begin("a")
    await bench.decoding("a")
    drain = bench.drain(max_wait_s=None, tokens_per_second=0.001)

    async def update():
        async with drain:
            pass

    task = asyncio.create_task(update())
    await asyncio.sleep(0)
    await bench.begin("b")
    await asyncio.sleep(0.1)
    assert "b" in bench.rollouts.lease_ids
    bench.engine.say("a", span(2, finish=FinishReason.STOP))
    await task
    await bench.decoding("b")


async def test_a_drain_that_takes_too_long_says_by_which_limit_it_ends(bench):
    await bench.begin("a")
    await bench.decoding("a")
    assert bench.rollouts.longest_remaining_tokens > 0
    drain = bench.drain(max_wait_s=0.02, tokens_per_second=20.0)
    with pytest.raises(DeadlineError, match=r"did not end within 0.02 s \(as engine.max_drain_s says\); they go on"):
        async with drain:
            pass
    assert bench.rollouts.decoding.may_begin


async def test_a_guest_has_a_slot_of_its_own_and_holds_updates_back_that_wait_for_silence(bench):
    async with bench.rollouts.unleased(timeout_s=5):
        assert bench.rollouts.num_free_slots() == 3
        assert not bench.rollouts.is_empty
        with pytest.raises(TimeoutError):
            async with bench.rollouts.decoding.silence(timeout_s=0.01):
                pass
    assert bench.rollouts.num_free_slots() == 4
    assert bench.rollouts.is_empty
    async with bench.rollouts.decoding.silence(timeout_s=0.01):
        with pytest.raises(TimeoutError):
            async with bench.rollouts.unleased(timeout_s=0.01):
                pass
        # Nothing new is asked for while samples may not begin.
        assert bench.rollouts.num_free_slots() == 0
    assert bench.rollouts.num_free_slots() == 4


async def test_a_guest_waits_until_a_lease_ends(bench):
    for number in range(4):
        await bench.begin(f"l{number}")
    entered = asyncio.Event()

    async def visit():
        async with bench.rollouts.unleased(timeout_s=5):
            entered.set()

    guest = asyncio.create_task(visit())
    await bench.decoding("l0")
    assert not entered.is_set()
    bench.engine.say("l0", span(2, finish=FinishReason.STOP))
    await asyncio.wait_for(guest, timeout=5)


async def test_no_guest_is_taken_once_the_generator_drains(bench):
    bench.rollouts.stop_accepting()
    with pytest.raises(EngineStoppedError):
        async with bench.rollouts.unleased(timeout_s=5):
            pass
