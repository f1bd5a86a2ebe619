"""Whatever numbers peers report, as far as the broker accepts them: dispatch decides, and soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.fleet import dispatcher as dispatcher_module
from services.broker.fleet.deal_round import Seat
from services.broker.fleet.dispatcher import Dispatcher
from services.broker.fleet.worker_registry import CONTEXT_GRACE_S, Peers
from services.broker.ingest.validation import MAX_ACTIVE_LEASES, MAX_STEP_S, check_beat, check_hello
from services.broker.operations import leasing, submission
from services.broker.operations.renewal import Heard
from services.broker.records.run_clock import RunClock
from services.broker.records.store import Delta
from services.broker.runtime.forecasts import MAX_EXPECTED_TOKENS, usable
from services.broker.runtime.heartbeats import GeneratorNote
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.stalls import stall_report
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.broker_model.profile import IS_LONG, LONG_FACTOR
from tests.helpers.brokers.broker import prompt
from tests.unit.broker.builders import finish, lease_scoring, open_state, put, score, suffix

pytestmark = pytest.mark.slow

POLICIES = ("fifo", "least_loaded", "lpt", "streamrl", "auto")
GROUP_SIZE, NUM_GROUPS, MAX_TOKENS = 2, 24, 1 << 20
NUM_ROUNDS = 4
LOOK_S = 0.02
_Message = TypeVar("_Message", broker_pb2.GeneratorHello, broker_pb2.GeneratorBeat)

AMOUNTS = (0.0, 5e-324, 1e-300, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e12, 1e300, 1.7e308)
TIMES_S = (-62_135_596_800, -1, 0, 1_000_000, 253_402_300_799)
amounts = st.sampled_from(AMOUNTS) | st.floats(0.0, allow_infinity=False)
step_times_s = st.sampled_from([amount for amount in AMOUNTS if amount <= MAX_STEP_S]) | st.floats(0.0, MAX_STEP_S)
counts = st.sampled_from((0, 1, 4, MAX_ACTIVE_LEASES))
counts32 = counts | st.just((1 << 32) - 1)
counts64 = counts32 | st.sampled_from((1 << 62, (1 << 64) - 1))
stamps = st.builds(Timestamp, seconds=st.sampled_from(TIMES_S))
forecasts = st.sampled_from((1e-45, 1e-6, 1.0, 1e3, MAX_EXPECTED_TOKENS)) | st.floats(width=32)


def is_accepted(check: Callable[[_Message], None], message: _Message) -> bool:
    """Whether the broker takes such a message."""
    try:
        check(message)
    except InvalidFieldError:
        return False
    return True


profiles = st.builds(
    broker_pb2.GeneratorProfile,
    kv_capacity_tokens=counts64,
    max_concurrent_samples=counts,
    step_base_s=step_times_s,
    step_per_sample_s=step_times_s,
    step_per_kv_token_s=step_times_s,
    prefill_tokens_per_second=amounts,
)
hellos = st.builds(
    broker_pb2.GeneratorHello,
    run_id=st.just("run-1"),
    generator_id=st.just("gen"),
    max_context_tokens=st.sampled_from((2, 128, (1 << 32) - 1)),
    profile=profiles,
).filter(partial(is_accepted, check_hello))
beats = st.builds(
    broker_pb2.GeneratorBeat,
    credit_total=counts64,
    policy_version=st.sampled_from((0, 1, (1 << 63) - 1)),
    num_running=counts32,
    num_waiting=counts32,
    kv_cache_usage=amounts,
    tokens_per_second=amounts,
    busy_spans=st.lists(st.builds(types_pb2.TimeSpan, start_time=stamps, end_time=stamps), max_size=2),
    now_time=st.none() | stamps,
).filter(lambda beat: is_accepted(partial(check_beat, lease_ids=beat.active_lease_ids), beat))
PLAIN = broker_pb2.GeneratorHello(run_id="run-1", generator_id="gen", max_context_tokens=128)
SLOWEST = broker_pb2.GeneratorBeat(credit_total=4, num_running=(1 << 32) - 1, tokens_per_second=5e-324)
Reports = list[tuple[broker_pb2.GeneratorHello, list[broker_pb2.GeneratorBeat]]]
"""What some generators say: a hello and heartbeats."""


class Broker:
    """A run with work queued, and the generators that reported."""

    def __init__(self, policy: str) -> None:
        self.clock = ManualClock()
        self.run_clock = RunClock(self.clock)
        self.store = MemoryStore()
        self.metrics = BrokerMetrics(CollectorRegistry())
        self.seats: dict[str, Seat] = {}
        self.peers = Peers("run-1", store=self.store, clock=self.run_clock)
        self.dispatcher = Dispatcher(self.peers)
        self.state = open_state(
            policy=broker_pb2.RunPolicy(dispatch=policy),
            groups_per_step=NUM_GROUPS,
            group_size=GROUP_SIZE,
            max_completion_tokens=MAX_TOKENS,
            max_staleness=1,
        )

    def submit(self, expected: list[float]) -> None:
        """Submit a queue of prompts, whose lengths a scheduler forecast."""
        prompts = [prompt(f"g{number}", group_size=GROUP_SIZE) for number in range(NUM_GROUPS)]
        forecasts = {
            one.group_id: tokens
            for number, one in enumerate(prompts)
            if expected and (tokens := usable(expected[number % len(expected)])) is not None
        }
        now_s = self.clock.now_s()
        assert submission.submit(self.state, prompts, retired=(), now_s=now_s, forecasts=forecasts) == []
        self.state.settle()

    async def hear(self, hello: broker_pb2.GeneratorHello, reported: list[broker_pb2.GeneratorBeat]) -> None:
        """What a lease stream does with a generator's frames."""
        hello.generator_id = f"gen-{len(self.seats)}"
        await self.peers.meet_generator(hello)
        for beat in reported:
            num_free = min(MAX_ACTIVE_LEASES, beat.credit_total)
            self.peers.see_generator(hello, beat, num_free=num_free)
            facts = leasing.GeneratorFacts(
                generator_id=hello.generator_id,
                policy_version=beat.policy_version,
                max_context_tokens=hello.max_context_tokens,
            )
            self.seats[hello.generator_id] = Seat(facts, num_free=num_free)
            self.clock.advance(1.5)

    async def turn(self) -> None:
        """All that is done for a run, once."""
        state, dispatcher, now_s = self.state, self.dispatcher, self.clock.now_s()
        await dispatcher.review(state, now_s)
        for name, seat in self.seats.items():
            deal = dispatcher.deal(state, name, self.seats, now_s, make_suffix=suffix)
            for other, grants in deal.grants.items():
                self.seats[other].num_free -= len(grants)
            dispatcher.why_none(state, seat.facts, deal)
            state.settle()
        self._decode()
        for name, seat in self.seats.items():
            dispatcher.take_over(state, seat.facts, GROUP_SIZE, now_s, suffix)
            state.settle()
            heard = Heard(
                holder_id=name,
                lease_ids=frozenset(state.generation_leases.get(name, ())),
                heard_s=now_s,
                tokens_per_second=self.peers.sample_speed(name),
            )
            GeneratorNote(heard=heard, on_silent=lambda *_: None).renew(state, self.run_clock)()
            state.settle()
        dispatcher.describe(state, "")
        present = self.peers.present()
        stall_report.waiting(state, present, now_s)
        waits = stall_report.waits(state, present, now_s)
        self.metrics.observe(state, num_conflicts=0, waits=waits, now_s=now_s)
        await self.peers.refresh()
        await self.peers.views(0.0)

    def _decode(self) -> None:
        """Of each generator one sample ends, and the others have a token."""
        state = self.state
        for name in self.seats:
            for number, (lease_id, sample) in enumerate(list(state.generation_leases.get(name, {}).items())[:3]):
                record = state.groups[sample[0]].samples[sample[1]]
                grant = leasing.Grant(
                    lease_id=lease_id,
                    sample=sample,
                    attempt=record.attempt,
                    num_prefix_tokens=record.num_tokens,
                    expire_s=0.0,
                    life_s=0.0,
                    min_policy_version=0,
                    token_shard=0,
                )
                now_s = self.clock.now_s()
                if number:
                    put(state, grant, [1], holder=name, offset=record.num_tokens, now_s=now_s)
                else:
                    finish(state, [grant], holder=name)
        for scoring in lease_scoring(state, GROUP_SIZE):
            score(state, scoring)
        state.settle()


@pytest.mark.parametrize("policy", POLICIES)
@settings(
    max_examples=12 * (LONG_FACTOR if IS_LONG else 1),
    derandomize=not IS_LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    reports=st.lists(st.tuples(hellos, st.lists(beats, min_size=1, max_size=3)), min_size=1, max_size=4),
    expected=st.lists(forecasts, max_size=6),
)
@example(reports=[(PLAIN, [SLOWEST])], expected=[])
def test_no_report_stops_a_round_or_the_caretaker(policy: str, reports: Reports, expected: list[float]) -> None:
    async def run() -> None:
        broker = Broker(policy)
        await broker.store.commit("run-1", None, Delta(run=b""))
        broker.submit(expected)
        for hello, sent in reports:
            await broker.hear(hello, sent)
        broker.clock.advance(CONTEXT_GRACE_S)
        for _ in range(NUM_ROUNDS):
            await broker.turn()
            broker.clock.advance(1.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher_module, "MAX_LOOK_S", LOOK_S)
        patch.setattr(dispatcher_module, "MAX_BEAT_AGE_S", 60.0)
        asyncio.run(run())
