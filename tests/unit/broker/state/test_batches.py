"""Finished groups from the put to the optimiser step, and every way they may leave it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from penstock.errors import InvalidFieldError, LeaseLostError, RunClosedError, VersionConflictError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import group_slices
from services.broker.ingest.trajectory_decoder import read_put
from services.broker.operations import append_trajectories, delivery, drops
from services.broker.operations.append_trajectories import Put, PutOutcome
from services.broker.operations.lifecycle import reopen_run
from services.broker.state import batches
from services.broker.state.batches import slice_of
from services.broker.state.run_audit import audit, totals
from services.broker.state.run_state import FORMAT, RunState
from tests.helpers.brokers.format_1 import as_format_1
from tests.helpers.brokers.trajectories import group, groups, pack_groups
from tests.unit.broker.builders import CONSUMER, acknowledge, deliver, lease, loaded, make_ready, open_state, submit

PUTS = iter(range(10**6))


def put(state: RunState, *made: types_pb2.TrajectoryGroup) -> PutOutcome:
    packed = pack_groups(made)
    request = Put(payload_id=f"payload-{next(PUTS)}", payload=packed, groups=read_put(packed))
    outcome = append_trajectories.put(state, request, 1.0)
    check(state)
    return outcome


def check(state: RunState) -> None:
    """The books balance and the queues are what the records say."""
    books = audit(state)
    assert books.balanced, books
    assert totals(state) == books
    records = {name: record.SerializeToString() for name, record in state.groups.items()}
    again = loaded(state.run.SerializeToString(), records)
    queues = ("live", "ready", "delivered", "trained", "versions", "record_of", "trained_bytes", "ready_bytes")
    counts = ("num_started", "num_ready", "num_delivered", "num_ready_puts", "live_bytes", "retained_bytes")
    for field in (*queues, *counts):
        assert getattr(state.index, field) == getattr(again.index, field), field
    assert +state.index.num_samples == +again.index.num_samples
    for version in range(-1, state.run.policy_version + 2):
        numbers = [(index.num_due(version), index.num_ready_due(version)) for index in (state.index, again.index)]
        assert numbers[0] == numbers[1]


def held(state: RunState, names: Iterable[str]) -> list[str]:
    """Group ids of what `deliver` chose."""
    return [group_id for name in names for group_id in batches.ids(state.groups[name])]


def attach(state: RunState, group_ids: Iterable[str] = ()) -> None:
    """The trainer comes back; CONSUMER stays the name of its stream."""
    delivery.attach(state, CONSUMER, held=frozenset(group_ids))
    state.run.streams[CONSUMER.key] = CONSUMER.mark


def step(state: RunState, version: int, count: int = 100) -> list[str]:
    ids = held(state, deliver(state, count))
    acknowledge(state, ids, version)
    check(state)
    return ids


def opened(**changes: Any) -> RunState:
    return open_state(**({"groups_per_step": 4, "max_staleness": 4} | changes))


def test_a_put_becomes_one_record_and_one_payload() -> None:
    state = opened()
    outcome = put(state, *groups("a", "b", "c"))
    assert (outcome.num_samples, outcome.errors, outcome.is_full) == (6, [], False)
    delta = state.delta()
    assert (len(delta.groups), len(delta.payloads), delta.fresh) == (1, 1, ["a", "b", "c"])
    assert audit(state).in_flight_by_state == {"scored": 6}


def test_groups_welcome_together_are_stored_as_those_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [group("a", num_tokens=5), group("b", num_samples=1, version=3), group("c", version=2)]
    packed = pack_groups(made)
    request = Put(payload_id="payload", payload=packed, groups=read_put(packed))
    states = [opened(version=3), opened(version=3)]
    outcomes = [append_trajectories.put(states[0], request, 1.0)]
    monkeypatch.setattr(append_trajectories, "_are_all_welcome", lambda _state, _groups: False)
    outcomes.append(append_trajectories.put(states[1], request, 1.0))
    assert outcomes[0] == outcomes[1] == PutOutcome(num_samples=5)
    records = [state.groups["a"] for state in states]
    assert records[0] == records[1]
    assert (list(records[0].put.num_tokens), list(records[0].put.sample_tokens)) == ([16, 6, 12], [5, 5, 3, 3, 3])
    assert states[0].delta() == states[1].delta()
    check(states[0])


def test_groups_the_run_knows_are_accepted_again_without_effect() -> None:
    state = opened()
    submit(state, "prompt")
    put(state, *groups("a", "b"))
    assert put(state, *groups("a", "b", "prompt")).num_samples == 0
    outcome = put(state, *groups("b", "c", "c"))
    assert (outcome.num_samples, outcome.errors) == (2, [])
    state.known_retired.add("old")
    assert put(state, *groups("old")).num_samples == 0
    submit(state, "a")
    assert [name for name, record in state.groups.items() if not record.HasField("put")] == ["prompt"]
    assert audit(state).submitted == 8


@pytest.mark.parametrize(
    ("bad", "reason", "words"),
    [
        (group("x", num_samples=3), "INVALID_FIELD", "group size"),
        (group("x", num_tokens=65), "INVALID_FIELD", "65 tokens"),
        (group("x", version=6), "INVALID_FIELD", "ahead of the run's 5"),
        (group("x", version=0), "STALE", "more than 4 behind"),
    ],
    ids=["size", "length", "future", "stale"],
)
def test_what_does_not_fit_the_run_is_refused_and_the_rest_is_stored(
    bad: types_pb2.TrajectoryGroup, reason: str, words: str
) -> None:
    state = opened(version=5)
    outcome = put(state, group("a", version=4), bad, group("b", version=5))
    assert [(error.index, error.reason) for error in outcome.errors] == [(1, reason)]
    assert words in outcome.errors[0].message
    assert outcome.num_samples == 4
    assert sorted(state.index.record_of) == ["a", "b"]
    assert held(state, deliver(state)) == ["a", "b"]


def test_a_group_that_could_not_come_in_time_is_refused_where_staleness_is_waited_for() -> None:
    state = opened(max_staleness=1, max_queued_groups=100)
    for first in range(0, 8, 4):
        assert put(state, *groups(*(f"g{number}" for number in range(first, first + 4)))).errors == []
    assert [error.reason for error in put(state, *groups("late", "later")).errors] == ["STALE", "STALE"]
    assert step(state, 1) == ["g0", "g1", "g2", "g3"]
    assert [error.reason for error in put(state, *groups("late")).errors] == ["STALE"]
    assert put(state, group("new", version=1)).errors == []
    assert step(state, 2) == ["g4", "g5", "g6", "g7"]
    assert step(state, 3) == ["new"]
    assert "stale" not in audit(state).dropped


def test_of_two_groups_the_one_that_is_too_many_is_refused() -> None:
    state = opened(max_staleness=0)
    put(state, *groups("a", "b", "c"))
    outcome = put(state, *groups("d", "e"))
    assert [(error.index, error.reason) for error in outcome.errors] == [(1, "STALE")]
    assert sorted(state.index.record_of) == ["a", "b", "c", "d"]


def test_generators_start_nothing_that_puts_leave_no_room_for() -> None:
    state = opened(max_staleness=0)
    put(state, *groups("a", "b", "c"))
    submit(state, "p", "q")
    assert {grant.sample[0] for grant in lease(state, 9)} == {"p"}


def test_what_waits_is_bounded_and_a_request_is_refused_whole() -> None:
    state = opened(max_queued_groups=5, policy=broker_pb2.RunPolicy(stale=broker_pb2.STALE_POLICY_DROP))
    put(state, *groups("a", "b", "c", "d"))
    outcome = put(state, *groups("e", "f"))
    assert (outcome.is_full, outcome.num_samples, state.knows("e")) == (True, 0, False)
    assert put(state, *groups("a", "b")).is_full is False
    assert put(state, *groups("e")).num_samples == 2
    deliver(state)
    assert put(state, *groups("f", "g")).num_samples == 4


def test_a_request_of_more_groups_than_a_step_or_to_a_closed_run_is_refused() -> None:
    state = opened()
    with pytest.raises(InvalidFieldError, match="groups_per_step, 4"):
        put(state, *groups("a", "b", "c", "d", "e"))
    state.run.is_closed = True
    with pytest.raises(RunClosedError):
        put(state, *groups("a"))


def test_a_record_is_cut_where_a_microbatch_or_a_step_ends() -> None:
    state = opened()
    put(state, *groups("a", "b", "c"))
    put(state, *groups("d", "e", "f"))
    assert held(state, deliver(state, 2)) == ["a", "b"]
    assert held(state, deliver(state, 100)) == ["c", "d"]
    assert deliver(state) == []
    check(state)
    acknowledge(state, ["d", "b", "a", "c"], 1)
    assert step(state, 2) == ["e", "f"]
    assert audit(state).trained == 12


def test_pieces_of_a_record_find_their_bytes() -> None:
    state = opened()
    made = groups("a", "b", "c", "d")
    packed = pack_groups(made)
    put(state, *made)
    (name,) = state.groups
    assert state.carve(name, {"b", "d"}) == [state.index.record_of["b"], state.index.record_of["d"]]
    check(state)
    for number, (start, end) in enumerate(group_slices(packed)):
        piece = slice_of(state.groups[state.index.record_of["abcd"[number]]])
        assert (piece.start, piece.end) == (start, end)
        assert types_pb2.TrajectoryGroups.FromString(packed[piece.start : piece.end]).groups[0] == made[number]


def test_puts_and_leased_groups_go_by_deadline_then_by_submission() -> None:
    state = opened(version=1)
    make_ready(state, "made", version=1)
    put(state, *groups("young", version=1))
    put(state, *groups("old", version=0))
    assert held(state, deliver(state)) == ["old", "made", "young"]


def test_a_microbatch_aims_at_tokens_inside_a_put_too() -> None:
    state = opened()
    put(state, *groups("a", "b", "c", "d", num_tokens=7))
    chosen = delivery.deliver(state, CONSUMER, max_groups=9, target_tokens=30)
    assert held(state, chosen) == ["a", "b"]


def test_a_trainer_that_comes_back_keeps_what_it_holds_and_gets_the_rest_again() -> None:
    state = opened()
    put(state, *groups("a", "b", "c"))
    deliver(state)
    attach(state, ["b"])
    check(state)
    assert audit(state).in_flight_by_state == {"delivered": 2, "scored": 4}
    assert held(state, deliver(state)) == ["a", "c"]


def test_groups_a_trainer_holds_are_not_handed_out_again_by_a_store_that_forgot() -> None:
    state = opened()
    put(state, *groups("a", "b", "c"))
    attach(state, ["b", "c"])
    assert held(state, deliver(state)) == ["a"]


def test_only_what_a_consumer_holds_can_be_acknowledged() -> None:
    state = opened()
    put(state, *groups("a", "b"))
    for consumer_id in ("", "rank-0"):
        with pytest.raises(LeaseLostError):
            delivery.acknowledge(state, consumer_id, ["a"], 1, 6.0)
    deliver(state, 1)
    with pytest.raises(LeaseLostError):
        acknowledge(state, ["a", "b"], 1)
    with pytest.raises(LeaseLostError):
        delivery.acknowledge(state, "rank-1", ["a"], 1, 6.0)
    receipt = acknowledge(state, ["a"], 1)
    assert (receipt.num_samples, receipt.policy_version) == (2, 1)
    assert acknowledge(state, ["a"], 1) == receipt
    with pytest.raises(VersionConflictError):
        acknowledge(state, ["b"], 1)


def test_some_groups_of_a_put_may_be_dropped() -> None:
    state = opened()
    put(state, *groups("a", "b", "c"))
    payload_id = next(iter(state.groups.values())).put.payload_id
    assert drops.drop_groups(state, ["b", "nobody"], "poisoned") == 2
    check(state)
    assert (dict(audit(state).dropped), state.pending.retired) == ({"poisoned": 2}, {"b"})
    assert state.delta().dropped_payloads == set()
    state.settle()
    assert step(state, 1) == ["a", "c"]
    assert drops.drop_groups(state, ["a"], "late") == 0
    assert state.index.is_used(payload_id)


def test_payload_goes_with_its_last_record() -> None:
    state = opened()
    put(state, *groups("a", "b"))
    state.settle()
    drops.drop_groups(state, ["a"], "x")
    assert state.delta().dropped_payloads == set()
    state.settle()
    drops.drop_groups(state, ["b"], "x")
    assert len(state.delta().dropped_payloads) == 1


def test_groups_without_a_gradient_are_counted_and_not_kept() -> None:
    state = opened(policy=broker_pb2.RunPolicy(drops_zero_variance=True))
    flat = group("flat")
    for sample in flat.trajectories:
        sample.score.value = 0.5
    outcome = put(state, group("a"), flat, group("b"))
    assert (outcome.num_samples, outcome.errors) == (6, [])
    assert dict(audit(state).dropped) == {"zero_variance": 2}
    assert state.pending.retired == {"flat"}
    assert held(state, deliver(state)) == ["a", "b"]


def test_what_became_too_stale_is_dropped_and_the_rest_of_its_put_stays() -> None:
    state = opened(max_staleness=1, policy=broker_pb2.RunPolicy(stale=broker_pb2.STALE_POLICY_DROP), version=1)
    put(state, group("old", version=0), group("new", version=1))
    make_ready(state, "x", version=1)
    state.run.policy_version = 2
    assert sorted(held(state, deliver(state))) == ["new", "x"]
    assert dict(audit(state).dropped) == {"stale": 2}
    check(state)


def test_a_rewind_hands_trained_puts_out_again() -> None:
    state = opened()
    put(state, *groups("a", "b"))
    put(state, *groups("c"))
    assert step(state, 1, 2) == ["a", "b"]
    assert step(state, 2) == ["c"]
    request = broker_pb2.OpenRunRequest(
        run_id="run-1", limits=state.limits.to_proto(), policy_version=1, takes_over=True
    )
    assert reopen_run(state, request, 2.0).num_groups_rewound == 1
    check(state)
    attach(state)
    assert step(state, 2) == ["c"]
    assert audit(state).trained == 6


def test_a_rewind_gives_up_what_abandoned_weights_sampled() -> None:
    state = opened(version=1)
    put(state, group("kept", version=1), group("gone", version=1))
    assert step(state, 2) == ["kept", "gone"]
    put(state, group("early", version=1), group("late", version=2))
    request = broker_pb2.OpenRunRequest(
        run_id="run-1", limits=state.limits.to_proto(), policy_version=1, takes_over=True
    )
    reopen_run(state, request, 2.0)
    check(state)
    assert dict(audit(state).dropped) == {"abandoned_version": 2}
    attach(state)
    assert sorted(step(state, 2)) == ["early", "gone", "kept"]


def test_a_broker_that_lost_the_last_second_catches_up_with_puts_too() -> None:
    state = opened()
    put(state, *groups("a", "b", "c"))
    deliver(state, 2)
    steps = [broker_pb2.StepRecord(policy_version=1, group_ids=["a", "b"])]
    request = broker_pb2.OpenRunRequest(run_id="run-1", limits=state.limits.to_proto(), policy_version=1, steps=steps)
    reopen_run(state, request, 2.0)
    check(state)
    books = audit(state)
    assert (books.submitted, books.trained, books.in_flight) == (6, 4, 2)


def test_puts_are_retired_with_their_step() -> None:
    state = opened(policy=broker_pb2.RunPolicy(num_retained_steps=2))
    for version in range(4):
        put(state, group(f"g{version}", version=version))
        step(state, version + 1)
    assert sorted(state.index.trained) == [3, 4]
    assert state.run.forgotten_version == 2
    assert sorted(state.index.record_of) == ["g2", "g3"]


def test_older_steps_go_when_their_payload_is_more_than_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    state = opened()
    size_bytes = len(pack_groups([group("g1", version=1)]))
    monkeypatch.setattr(delivery, "MAX_TRAINED_BYTES", 2 * size_bytes)
    for version in range(4):
        put(state, group(f"g{version}", version=version))
        step(state, version + 1)
    assert sorted(state.index.trained) == [3, 4]
    request = broker_pb2.OpenRunRequest(
        run_id="run-1", limits=state.limits.to_proto(), policy_version=1, takes_over=True
    )
    response = reopen_run(state, request, 2.0)
    check(state)
    # Step 2 is gone; steps 3 and 4 are there, but weights that are abandoned sampled them.
    assert (response.num_groups_rewound, response.num_samples_abandoned) == (2, 2)
    books = audit(state)
    assert (books.trained, dict(books.dropped)) == (2, {"abandoned_step": 2, "abandoned_version": 4})


def test_an_operation_undone_leaves_records_as_they_were() -> None:
    state = opened()
    put(state, *groups("a", "b", "c"))
    state.keep()
    before = {name: record.SerializeToString() for name, record in state.groups.items()}
    drops.drop_groups(state, ["b"], "x")
    deliver(state)
    state.undo()
    check(state)
    assert {name: record.SerializeToString() for name, record in state.groups.items()} == before
    assert state.delta().dropped_payloads == set()
    state.rollback()
    assert dict(state.groups) == {}


def test_a_run_of_format_1_is_read_and_becomes_one_of_today_with_its_first_put_that_changes() -> None:
    old = opened()
    put(old, *groups("a", "b", "c", "d", version=0))
    make_ready(old, "leased")
    put(old, *groups("e", "f", "g"))
    assert (step(old, 1, 2), step(old, 2, 2)) == (["a", "b"], ["c", "d"])
    assert held(old, deliver(old, 2)) == ["leased", "e"]
    old.run.format = 1
    records: dict[str, bytes | None] = dict(as_format_1(record) for record in old.groups.values())
    state = loaded(old.run.SerializeToString(), records)
    assert not state.is_changed
    assert audit(state) == audit(old)
    assert held(state, deliver(state)) == ["f", "g"]
    check(state)
    acknowledge(state, ["f", "leased", "e"], 3)
    delta = state.delta()
    records |= delta.groups
    state = loaded(delta.run, {name: record for name, record in records.items() if record is not None})
    check(state)
    assert state.run.format == FORMAT
    assert [state.trained_ids(version) for version in (1, 2, 3)] == [{"a", "b"}, {"c", "d"}, {"leased", "e", "f"}]
    request = broker_pb2.OpenRunRequest(run_id="run-1", limits=state.limits.to_proto(), takes_over=True)
    assert reopen_run(state, request, 2.0).num_groups_rewound == 7
    check(state)
    attach(state)
    assert sorted(step(state, 1)) == ["a", "b", "c", "d"]
