from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import drops, leasing, token_ends
from services.broker.operations.leasing import Grant
from services.broker.records.token_tails import TailReport
from services.broker.records_pb2 import SampleRecord, SampleTail
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.unit.broker.builders import acknowledge, deliver, lease, lease_scoring, open_state, put, score, submit

QUEUED, LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
SEALING, FINISHED = broker_pb2.SAMPLE_STATE_SEALING, broker_pb2.SAMPLE_STATE_FINISHED
STOP, ABORTED = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORTED
LATE_S = 1_000.0


def sharded(**changes: Any) -> RunState:
    return open_state(policy=broker_pb2.RunPolicy(token_shards=4), **changes)


def running(**changes: Any) -> tuple[RunState, Grant]:
    state = sharded(group_size=1, **changes)
    submit(state, "a")
    (grant,) = lease(state, 1)
    state.settle()
    return state, grant


def sample(state: RunState) -> SampleRecord:
    return state.groups["a"].samples[0]


def say(state: RunState, grant: Grant, num_tokens: int, *, shard: int | None = None, **changes: Any) -> None:
    """Report the tail of a grant's sample."""
    group_id, index = grant.sample
    versions = {"min_version": 0, "max_version": 0} if num_tokens else {}
    tail = SampleTail(
        **{"lease_id": grant.lease_id, "num_tokens": num_tokens, "stored_bytes": 9 * num_tokens, **versions, **changes}
    )
    report = TailReport(group_id=group_id, sample_index=index, tail=tail)
    token_ends.take_reports(state, grant.token_shard if shard is None else shard, [report], 5.0)


def expire(state: RunState) -> int:
    return leasing.expire(state, LATE_S, unbroken_since_s=0.0)


def test_a_group_stays_in_the_home_shard_of_the_first_generator_that_leases_it() -> None:
    state = sharded(group_size=2)
    submit(state, "a", "b")
    first, second, third = (
        lease(state, 1, generator_id="gen-1")[0],
        lease(state, 1, generator_id="gen-2")[0],
        lease(state, 1, generator_id="gen-2")[0],
    )
    assert [grant.sample[0] for grant in (first, second, third)] == ["a", "a", "b"]
    assert first.token_shard == second.token_shard == leasing.home_shard("gen-1", 4)
    assert third.token_shard == leasing.home_shard("gen-2", 4)
    assert {leasing.home_shard(f"gen-{number}", 4) for number in range(100)} == {1, 2, 3, 4}


def test_a_run_without_shards_has_none() -> None:
    state = open_state(group_size=1, policy=broker_pb2.RunPolicy(token_shards=1))
    submit(state, "a")
    (grant,) = lease(state, 1)
    assert grant.token_shard == 0
    assert put(state, grant, [1, 2]) == []


def test_more_shards_than_are_allowed_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"policy\.token_shards: 1025; must be at most 1024"):
        open_state(policy=broker_pb2.RunPolicy(token_shards=1025))


def test_a_chunk_of_a_sharded_sample_sent_to_the_run_itself_is_refused_by_name() -> None:
    state, grant = running()
    (error,) = put(state, grant, [1, 2])
    assert (error.reason, error.message) == (
        "INVALID_FIELD",
        f"token_shard: 0; its lease says {grant.token_shard}",
    )


def test_progress_counts_tokens_without_turning_the_queues() -> None:
    state, grant = running()
    say(state, grant, 3, last_chunk_s=4.0)
    found = sample(state)
    assert (found.state, found.num_tokens, found.stored_bytes, found.last_chunk_s) == (LEASED, 3, 27, 4.0)
    assert state.only_grew
    assert state.index.stored_bytes("a") >= 27
    say(state, grant, 2)
    assert sample(state).num_tokens == 3


def test_a_finished_sample_goes_on_to_scoring_and_training() -> None:
    state, grant = running(groups_per_step=1)
    say(state, grant, 5, finish_reason=STOP)
    assert (sample(state).state, sample(state).num_tokens, sample(state).finish_s) == (FINISHED, 5, 5.0)
    say(state, grant, 5, finish_reason=STOP)
    (scoring,) = lease_scoring(state, 1)
    score(state, scoring)
    assert deliver(state) == ["a"]
    assert acknowledge(state, ["a"], 1).num_samples == 1
    assert audit(state).balanced


def test_a_returned_sample_is_queued_with_its_tokens() -> None:
    state, grant = running()
    say(state, grant, 5, finish_reason=ABORTED, is_sealed=True)
    assert (sample(state).state, sample(state).num_tokens) == (QUEUED, 5)
    (again,) = lease(state, 1, generator_id="gen-2")
    assert (again.num_prefix_tokens, again.token_shard) == (5, grant.token_shard)


def test_an_expired_lease_is_queued_only_once_its_tokens_are_counted() -> None:
    state, grant = running()
    assert expire(state) == 1
    assert (sample(state).state, state.sealing) == (SEALING, {("a", 0)})
    assert lease(state, 1) == []
    assert state.generation_leases == {}
    assert audit(state).in_flight_by_state["sealing"] == 1
    # What was said before the seal counts for nothing: more may have been stored since.
    say(state, grant, 4)
    assert sample(state).state == SEALING
    say(state, grant, 7, is_sealed=True)
    assert (sample(state).state, sample(state).num_tokens, state.sealing) == (QUEUED, 7, set())
    say(state, grant, 9, is_sealed=True)
    assert sample(state).num_tokens == 7
    assert [again.num_prefix_tokens for again in lease(state, 1)] == [7]


def test_a_sample_that_ended_before_it_was_sealed_is_finished() -> None:
    state, grant = running()
    expire(state)
    say(state, grant, 7, is_sealed=True, finish_reason=STOP)
    assert (sample(state).state, sample(state).num_tokens) == (FINISHED, 7)


def test_a_shard_that_lost_tokens_has_the_last_word() -> None:
    state, grant = running()
    say(state, grant, 9)
    expire(state)
    say(state, grant, 0, is_sealed=True)
    assert (sample(state).num_tokens, sample(state).stored_bytes) == (0, 0)
    assert not sample(state).HasField("min_version")


def test_a_sample_with_too_many_leases_is_dropped_when_it_is_sealed() -> None:
    state, grant = running(max_leases_per_sample=1)
    expire(state)
    say(state, grant, 1, is_sealed=True)
    assert "a" not in state.groups
    assert audit(state).dropped[drops.TOO_MANY_LEASES] + audit(state).dropped[drops.GROUP_TOO_SMALL] == 1
    assert audit(state).balanced


@pytest.mark.parametrize(
    "wrong", [{"lease_id": "other"}, {"shard": 5}, {"is_sealed": True}], ids=["lease", "shard", "sealed unasked"]
)
def test_what_is_not_said_of_the_current_lease_changes_nothing(wrong: dict[str, Any]) -> None:
    state, grant = running()
    say(state, grant, 7, **wrong)
    assert not state.is_changed


def test_a_report_of_a_restarted_sample_changes_nothing() -> None:
    state, grant = running()
    with state.edit("a") as group:
        drops.reset_sample(state, group, 0)
    say(state, grant, 7, finish_reason=STOP)
    assert (sample(state).state, sample(state).attempt, sample(state).num_tokens) == (QUEUED, 1, 0)


def test_a_report_of_an_unknown_group_or_sample_changes_nothing() -> None:
    state, grant = running()
    tail = SampleTail(lease_id=grant.lease_id, finish_reason=STOP)
    for group_id, index in (("b", 0), ("a", 1)):
        report = TailReport(group_id=group_id, sample_index=index, tail=tail)
        token_ends.take_reports(state, grant.token_shard, [report], 5.0)
    assert not state.is_changed


def test_tokens_of_older_weights_than_the_lease_make_the_group_as_old() -> None:
    state = sharded(group_size=1, version=3, max_staleness=4)
    submit(state, "a")
    (grant,) = lease(state, 1, version=3)
    say(state, grant, 2, min_version=2, max_version=3)
    assert state.index.versions == {"a": 2}


def test_of_two_ends_in_one_message_the_first_counts() -> None:
    state, grant = running()
    tails = [
        SampleTail(lease_id=grant.lease_id, num_tokens=4, finish_reason=STOP),
        SampleTail(lease_id=grant.lease_id, num_tokens=6, finish_reason=STOP),
    ]
    reports = [TailReport(group_id="a", sample_index=0, tail=tail) for tail in tails]
    token_ends.take_reports(state, grant.token_shard, reports, 5.0)
    assert (sample(state).state, sample(state).num_tokens) == (FINISHED, 4)
