from __future__ import annotations

import pytest

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.situation import Situation
from services.broker.dispatch.stealing_rule import MIN_STAY_S
from services.broker.fleet import work_stealing
from services.broker.fleet.snapshot import Fleet, GeneratorStatus
from services.broker.operations import leasing
from services.broker.operations.leasing import Grant
from services.broker.state.run_state import RunState
from tests.unit.broker.builders import facts, lease, open_state, put, submit, suffix

FAST = LatencyModel(base_s=0.1, per_sample_s=0.001, max_samples=8)
SLOW = FAST.scaled(5.0)
QUEUED, LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED


def running(*, forecast: float = 60.0, num_tokens: int = 4, **limits: int) -> tuple[RunState, Grant]:
    """One sample of a group of one on gen-1, some tokens decoded."""
    state = open_state(group_size=1, groups_per_step=4, max_staleness=1, **limits)
    submit(state, "a")
    with state.edit("a") as group:
        group.samples[0].predicted_tokens = forecast
    (grant,) = lease(state, 1)
    if num_tokens:
        assert put(state, grant, list(range(num_tokens))) == []
    return state, grant


def situation_of(state: RunState, statuses: dict[str, GeneratorStatus], asking: str, now_s: float) -> Situation:
    fleet = Fleet()
    return fleet.situation_of(state, statuses, fleet.loads(state, statuses, now_s), asking)


def take_over(
    state: RunState,
    *,
    there: LatencyModel = SLOW,
    here: LatencyModel = FAST,
    num_waiting: int = 0,
    now_s: float = 20.0,
    version: int = 0,
    is_speed_known: bool = True,
) -> list[Grant]:
    """gen-2 is idle and looks at what gen-1 holds."""
    statuses = {
        name: GeneratorStatus(
            generator_id=name, model=model, num_free=8, max_context_tokens=128, is_speed_known=is_speed_known
        )
        for name, model in (("gen-1", there), ("gen-2", here))
    }
    situation = situation_of(state, statuses, "gen-2", now_s)
    return work_stealing.take_over(
        state,
        facts(version, generator_id="gen-2"),
        situation,
        num_waiting={"gen-1": num_waiting},
        now_s=now_s,
        make_suffix=suffix,
    ).grants


def test_a_long_sample_moves_with_its_prefix_to_a_faster_generator() -> None:
    state, old = running()
    (new,) = take_over(state)
    assert (new.sample, new.num_prefix_tokens) == (("a", 0), 4)
    sample = state.groups["a"].samples[0]
    assert (sample.state, sample.generator_id, sample.num_moves) == (LEASED, "gen-2", 1)
    # The old lease is fenced at the last stored chunk; the new one goes on from there.
    (refused,) = put(state, old, [9, 9], offset=4)
    assert (refused.reason, refused.next_offset) == ("LEASE_LOST", 4)
    assert put(state, new, [5, 6], holder="gen-2", offset=4) == []


def test_nothing_moves_between_equal_generators_for_a_small_gain() -> None:
    state, _ = running()
    assert take_over(state, there=FAST) == []


def test_nothing_moves_that_ends_soon_anyway() -> None:
    # One token to go: 0.5 s there, 0.4 s with the hand-over here.
    state, _ = running(forecast=5.0)
    assert take_over(state) == []


def test_nothing_begun_moves_while_no_speed_is_known() -> None:
    state, _ = running()
    assert take_over(state, is_speed_known=False) == []


def test_prefill_of_the_prefix_is_part_of_the_price() -> None:
    state, _ = running()
    # 7 tokens of prompt and prefix at half a token a second.
    slow_prefill = LatencyModel(base_s=0.1, per_sample_s=0.001, max_samples=8, prefill_tokens_per_second=0.2)
    assert take_over(state, here=slow_prefill) == []
    assert take_over(state)


def test_a_sample_does_not_go_back_and_forth() -> None:
    state, _ = running()
    (new,) = take_over(state)
    assert put(state, new, [5], holder="gen-2", offset=4) == []
    with state.edit("a") as group:
        group.samples[0].last_chunk_s = 21.0
    back = {"gen-2": SLOW, "gen-1": FAST}

    def take_back(now_s: float) -> list[Grant]:
        statuses = {
            name: GeneratorStatus(
                generator_id=name, model=model, num_free=8, max_context_tokens=128, is_speed_known=True
            )
            for name, model in back.items()
        }
        situation = situation_of(state, statuses, "gen-1", now_s)
        moves = work_stealing.take_over(state, facts(0), situation, num_waiting={}, now_s=now_s, make_suffix=suffix)
        return moves.grants

    assert take_back(20.0 + MIN_STAY_S - 1) == []
    assert len(take_back(20.0 + MIN_STAY_S)) == 1


def test_a_lease_that_waits_in_a_full_engine_moves() -> None:
    state, old = running(num_tokens=0)
    assert take_over(state, num_waiting=0) == [], "it may just have begun"
    assert take_over(state, num_waiting=1, now_s=2.5) == [], "its first chunk may be on its way"
    (new,) = take_over(state, num_waiting=1)
    assert new.num_prefix_tokens == 0
    assert put(state, old, [1])[0].reason == "LEASE_LOST"


def test_moves_do_not_use_up_the_leases_of_a_sample() -> None:
    state, _ = running(max_leases_per_sample=1)
    take_over(state)
    assert state.groups["a"].samples[0].num_leases == 2
    assert leasing.expire(state, 1e9) == 1
    assert "a" not in state.groups, "the one lease that counts was lost"

    state, _ = running(max_leases_per_sample=2)
    take_over(state)
    leasing.expire(state, 1e9)
    assert state.groups["a"].samples[0].state == QUEUED


@pytest.mark.parametrize("version", [2])
def test_a_generator_that_may_not_continue_takes_nothing_over(version: int) -> None:
    state, _ = running()
    assert take_over(state, version=version) == []
