"""What dispatch makes of what a broker knows of its generators."""

from __future__ import annotations

from penstock.clock import ManualClock
from penstock.heartbeat_interval import LONGEST_ASKED_S
from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import UNKNOWN_MAX_SAMPLES
from services.broker.fleet.deal_round import Seat
from services.broker.fleet.dispatcher import Dispatcher
from services.broker.fleet.worker_registry import Peers
from services.broker.operations import leasing
from services.broker.operations.leasing import Grant
from services.broker.records.run_clock import RunClock
from services.broker.records.store import Delta
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.unit.broker.builders import facts, open_state, submit, suffix

NUM_SLOTS = 2 * UNKNOWN_MAX_SAMPLES
GROUP_SIZE = 16


async def _dispatcher(*, beat_version: int, local: ManualClock | None = None) -> Dispatcher:
    """Knows one generator of NUM_SLOTS, whose newest beat named that version."""
    store, clock = MemoryStore(), RunClock(local or ManualClock())
    await store.commit("run-1", None, Delta(run=b""))
    peers = Peers("run-1", store=store, clock=clock)
    hello = broker_pb2.GeneratorHello(
        run_id="run-1",
        generator_id="gen-1",
        max_context_tokens=128,
        profile=broker_pb2.GeneratorProfile(max_concurrent_samples=NUM_SLOTS, kv_capacity_tokens=1_000_000),
    )
    beat = broker_pb2.GeneratorBeat(policy_version=beat_version, credit_total=NUM_SLOTS)
    peers.see_generator(hello, beat, num_free=NUM_SLOTS)
    return Dispatcher(peers)


def _run() -> RunState:
    """On-policy, at version 1, with a step's groups queued that fill the generator."""
    num_groups = NUM_SLOTS // GROUP_SIZE
    policy = broker_pb2.RunPolicy(dispatch="lpt")
    state = open_state(version=1, policy=policy, groups_per_step=num_groups, group_size=GROUP_SIZE, max_staleness=0)
    assert submit(state, *(f"g{number}" for number in range(num_groups))) == []
    return state


def _lease(dispatcher: Dispatcher, state: RunState, *, version: int) -> tuple[list[Grant], str]:
    """The grants of one round, and the reason why there are no more."""
    seat = Seat(facts(version), num_free=NUM_SLOTS)
    grants: list[Grant] = []
    is_cut = True
    while is_cut:
        deal = dispatcher.deal(state, "gen-1", {"gen-1": seat}, ManualClock().now_s(), make_suffix=suffix)
        found, is_cut = deal.grants.get("gen-1", []), deal.is_cut
        seat.num_free -= len(found)
        grants += found
    return grants, dispatcher.why_none(state, seat.facts, deal)


async def test_a_generator_is_filled_at_once_though_its_last_beat_named_a_version_that_may_not_start() -> None:
    dispatcher = await _dispatcher(beat_version=0)
    assert len(_lease(dispatcher, _run(), version=1)[0]) == NUM_SLOTS


async def test_a_generator_counts_while_a_heartbeat_at_the_longest_interval_is_late() -> None:
    local = ManualClock()
    dispatcher = await _dispatcher(beat_version=1, local=local)
    for seconds, num_live in ((LONGEST_ASKED_S + 4.0, 1), (LONGEST_ASKED_S, 0)):
        local.advance(seconds)
        assert len(dispatcher._live()) == num_live


async def test_what_admission_refuses_is_not_called_an_empty_queue() -> None:
    dispatcher, state = await _dispatcher(beat_version=1), _run()
    assert len(_lease(dispatcher, state, version=1)[0]) == NUM_SLOTS
    submit(state, "one-more")
    grants, reason = _lease(dispatcher, state, version=1)
    assert grants == []
    assert reason != leasing.NOTHING_QUEUED
