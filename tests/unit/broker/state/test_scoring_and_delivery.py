from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import (
    InvalidFieldError,
    LeaseLostError,
    ServiceUnavailableError,
    StaleError,
    UnknownSampleError,
    VersionConflictError,
)
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import delivery, drops, scores
from services.broker.operations.delivery import Consumer
from services.broker.rules.sample_policy import DEFAULT_RETAINED_STEPS
from services.broker.state.run_audit import audit
from tests.unit.broker.builders import (
    CONSUMER,
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    make_ready,
    open_state,
    score,
    submit,
)

EVALUATE = types_pb2.PURPOSE_EVALUATE


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (types_pb2.SCORE_STATUS_ABSTAINED, "reward_abstained"),
        (types_pb2.SCORE_STATUS_TIMEOUT, "reward_timeout"),
        (types_pb2.SCORE_STATUS_FAILED, "reward_failed"),
        (types_pb2.SCORE_STATUS_INVALID, "reward_invalid"),
        (types_pb2.SCORE_STATUS_CANDIDATE_LIMIT, "reward_candidate_limit"),
        (types_pb2.SCORE_STATUS_SANDBOX_ERROR, "reward_sandbox_error"),
        (types_pb2.SCORE_STATUS_JUDGE_ERROR, "reward_judge_error"),
    ],
)
def test_a_failed_score_drops_the_sample_by_its_reason(status: types_pb2.ScoreStatus.ValueType, reason: str) -> None:
    state = open_state(group_size=3)
    submit(state, "a")
    finish(state, lease(state, 3))
    first, *others = lease_scoring(state, 9)
    scores.check_result(broker_pb2.ScoreResult(score=types_pb2.Score(status=status)))
    score(state, first, status)
    for grant in others:
        score(state, grant)
    assert audit(state).dropped == {reason: 1}
    assert deliver(state) == ["a"]
    acknowledge(state, ["a"], 1)
    assert (audit(state).trained, audit(state).balanced) == (2, True)


def test_a_group_left_with_one_sample_is_dropped_whole() -> None:
    state = open_state(group_size=2)
    submit(state, "a")
    finish(state, lease(state, 2))
    first, second = lease_scoring(state, 9)
    score(state, first)
    score(state, second, types_pb2.SCORE_STATUS_FAILED)
    assert audit(state).dropped == {"reward_failed": 1, "group_too_small": 1}
    assert (deliver(state), state.index.versions) == ([], {})


def test_an_evaluation_group_is_delivered_even_when_nothing_is_left_of_it() -> None:
    state = open_state()
    submit(state, "e", purpose=EVALUATE, group_size=1)
    finish(state, lease(state, 1))
    score(state, lease_scoring(state, 1)[0], types_pb2.SCORE_STATUS_TIMEOUT)
    consumer = Consumer(consumer_id="rank-0", purpose=EVALUATE, stream_id="e")
    consumer = delivery.attach(state, consumer, held=())
    assert delivery.deliver(state, consumer, max_groups=9, target_tokens=0) == ["e"]
    assert drops.drop_groups(state, ["e"], "evaluated") == 0
    assert (audit(state).submitted, audit(state).dropped, state.groups) == (0, {}, {})


def test_a_repeated_score_is_accepted_and_a_late_one_is_lost() -> None:
    state = open_state()
    submit(state, "a")
    finish(state, lease(state, 2))
    first, second = lease_scoring(state, 2)
    assert score(state, first).accepted == [first.lease_id]
    assert score(state, first).accepted == [first.lease_id]
    assert scores.expire_scoring(state, 64.0) == 1
    [again] = lease_scoring(state, 9, now_s=70.0)
    assert again.sample == second.sample
    assert score(state, second).lost == [second.lease_id]
    assert score(state, again).accepted == [again.lease_id]


def test_a_sample_that_kills_every_reward_worker_is_dropped() -> None:
    state = open_state(max_leases_per_sample=2)
    submit(state, "a")
    finish(state, lease(state, 2))
    for now_s in (0.0, 100.0):
        lease_scoring(state, 1, now_s=now_s)
        scores.expire_scoring(state, now_s + 61)
    assert audit(state).dropped == {"too_many_leases": 1, "group_too_small": 1}


@pytest.mark.parametrize(
    "score_of",
    [
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=float("nan")),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=-1e13),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_FAILED, value=0.0),
        types_pb2.Score(value=1.0),
        types_pb2.Score(status=99, value=1.0),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0, components={"a": float("inf")}),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0, components={"a" * 65: 1.0}),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0, details={str(n): "" for n in range(17)}),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0, details={"a": "b" * 257}),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0, model="m" * 65),
        types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0, message="m" * 1025),
    ],
)
def test_a_malformed_score_is_refused(score_of: types_pb2.Score) -> None:
    with pytest.raises(InvalidFieldError):
        scores.check_result(broker_pb2.ScoreResult(lease_id="l", score=score_of))


def test_a_step_gets_no_more_than_its_groups() -> None:
    state = open_state(groups_per_step=2, max_staleness=1)
    make_ready(state, "a", "b", "c", "d")
    assert len(deliver(state)) == 2
    assert deliver(state) == []


def test_a_slow_due_group_is_waited_for_so_that_none_becomes_too_stale() -> None:
    state = open_state(groups_per_step=2, max_staleness=1)
    submit(state, "slow")
    slow = lease(state, 2)
    make_ready(state, "a", "b", "c")
    acknowledge(state, deliver(state), 1)
    make_ready(state, "d", "e", version=1)
    assert deliver(state) == ["c"]
    finish(state, slow, 0)
    for grant in lease_scoring(state, 9):
        score(state, grant)
    assert deliver(state) == ["slow"]
    receipt = acknowledge(state, ["c", "slow"], 2)
    assert (receipt.num_samples, receipt.max_staleness_seen) == (4, 1)
    assert audit(state).trained_by_staleness == {0: 4, 1: 4}


def test_a_group_delivered_late_by_its_trainer_cannot_be_acknowledged_too_stale() -> None:
    state = open_state(groups_per_step=2, max_staleness=0)
    make_ready(state, "a", "b")
    deliver(state)
    acknowledge(state, ["a"], 1)
    assert "b" not in state.groups
    assert audit(state).dropped == {"stale": 2}
    with pytest.raises(UnknownSampleError):
        acknowledge(state, ["b"], 2)


def test_a_stale_group_is_never_marked_trained() -> None:
    state = open_state(groups_per_step=1, max_staleness=0)
    make_ready(state, "a")
    deliver(state)
    state.run.policy_version = 1
    with pytest.raises(StaleError):
        acknowledge(state, ["a"], 2)
    assert audit(state).trained == 0


def test_what_a_reconnected_trainer_does_not_hold_is_handed_out_again() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    assert set(deliver(state)) == {"a", "b"}
    newer = Consumer(consumer_id="rank-0", purpose=CONSUMER.purpose, stream_id="newer")
    newer = delivery.attach(state, newer, held=["a"])
    assert state.index.first_ready(CONSUMER.purpose, 9) == ["b"]
    assert delivery.deliver(state, newer, max_groups=9, target_tokens=0) == ["b"]
    with pytest.raises(LeaseLostError):
        deliver(state)


def test_a_group_the_trainer_holds_is_not_handed_out_though_the_broker_forgot() -> None:
    state = open_state()
    make_ready(state, "a")
    consumer = delivery.attach(state, CONSUMER, held=["a"])
    assert delivery.deliver(state, consumer, max_groups=9, target_tokens=0) == []
    assert acknowledge(state, ["a"], 1).num_samples == 2


def test_a_stream_whose_beginning_the_store_lost_must_say_hello_again() -> None:
    """Else it would wait for groups that the store takes to be in its hands."""
    state = open_state()
    later = replace(CONSUMER, number=2)
    with pytest.raises(ServiceUnavailableError):
        delivery.check_attached(state, later)
    state.run.streams.clear()
    with pytest.raises(ServiceUnavailableError):
        delivery.deliver(state, CONSUMER, max_groups=9, target_tokens=0)


def test_acknowledging_twice_changes_nothing() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    deliver(state)
    first = acknowledge(state, ["a", "b"], 1)
    state.settle()
    assert acknowledge(state, ["b", "a"], 1) == first
    assert not state.is_changed


def test_a_step_that_does_not_follow_is_refused_whole() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    deliver(state)
    for version in (0, 2, 7):
        with pytest.raises(VersionConflictError):
            acknowledge(state, ["a", "b"], version)
    with pytest.raises(LeaseLostError):
        delivery.acknowledge(state, "rank-1", ["a"], 1, 0.0)
    with pytest.raises(UnknownSampleError):
        acknowledge(state, ["a", "nobody"], 1)
    with pytest.raises(InvalidFieldError):
        acknowledge(state, [], 1)
    assert (audit(state).trained, state.run.policy_version) == (0, 0)


def test_steps_older_than_the_retention_are_forgotten_but_their_ids_are_not() -> None:
    state = open_state(groups_per_step=1)
    for version in range(DEFAULT_RETAINED_STEPS + 1):
        make_ready(state, f"g{version}", version=version)
        acknowledge(state, deliver(state), version + 1)
    assert sorted(state.index.trained) == list(range(2, DEFAULT_RETAINED_STEPS + 2))
    assert state.pending.retired == {"g0"}
    assert (audit(state).trained, audit(state).balanced) == (2 * (DEFAULT_RETAINED_STEPS + 1), True)


def test_dropping_groups_is_idempotent_and_leaves_trained_ones() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    deliver(state)
    assert drops.drop_groups(state, ["b"], "poisoned") == 2
    assert drops.drop_groups(state, ["b"], "poisoned") == 0
    acknowledge(state, ["a"], 1)
    assert drops.drop_groups(state, ["a"], "poisoned") == 0
    assert audit(state).dropped == {"poisoned": 2}


def test_a_books_error_shows() -> None:
    state = open_state()
    submit(state, "a")
    state.run.submitted += 1
    assert not audit(state).balanced
