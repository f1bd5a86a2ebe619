"""Last chunks that bring their sample's score: environments' samples, which no reward worker sees."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import float32_bytes
from services.broker.ingest.validation import check_environment
from services.broker.operations import token_ends
from services.broker.records.token_tails import TailReport
from services.broker.records_pb2 import SampleTail
from services.broker.state.run_state import RunState
from tests.unit.broker.builders import deliver, lease, lease_scoring, open_state, put, submit

STOP, ABORTED = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORTED
OK, DIVERGED = types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_ENVIRONMENT_DIVERGED
DROP = broker_pb2.RunPolicy(has_environment=True, partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_DROP)


def scored(value: float | None = 1.5, status: types_pb2.ScoreStatus.ValueType = OK, **fields: Any) -> types_pb2.Score:
    return types_pb2.Score(status=status, value=value, **fields)


def run(**changes: Any) -> tuple[RunState, list[Any]]:
    changes = {"policy": broker_pb2.RunPolicy(has_environment=True)} | changes
    state = open_state(group_size=2, **changes)
    submit(state, "a")
    return state, lease(state, 2)


def test_a_scored_sample_is_ready_without_a_reward_worker() -> None:
    state, grants = run()
    turns = float32_bytes([0.5, 1.0])
    for grant in grants:
        assert put(state, grant, [5, 6], finish=STOP, loss_mask=b"\1\0", score=scored(turn_values=turns)) == []
    assert lease_scoring(state, 9) == []
    assert deliver(state) == ["a"]
    [sample, _] = state.groups["a"].samples
    assert (sample.score.value, sample.score.turn_values, sample.score_s) == (1.5, turns, 3.0)
    # A repetition changes nothing, and is no error.
    assert put(state, grants[0], [5, 6], finish=STOP, loss_mask=b"\1\0", score=scored(9.0)) == []
    assert state.groups["a"].samples[0].score.value == 1.5


def test_a_sample_scored_with_an_error_is_dropped_by_its_name() -> None:
    state, grants = run(policy=DROP)
    put(state, grants[0], [5, 6], finish=STOP, score=scored(None, DIVERGED, message="turn 1 differs"))
    assert "a" not in state.groups
    assert state.run.dropped["reward_environment_diverged"] == 1


def test_a_scored_sample_still_waits_for_a_reference() -> None:
    state, grants = run(policy=broker_pb2.RunPolicy(needs_reference_logprobs=True, has_environment=True))
    put(state, grants[0], [5, 6], finish=STOP, score=scored())
    assert state.groups["a"].samples[0].state == broker_pb2.SAMPLE_STATE_FINISHED
    assert lease_scoring(state, 9) == []


def test_a_shard_passes_the_score_on_with_the_end() -> None:
    state = open_state(group_size=1)
    submit(state, "a")
    [grant] = lease(state, 1)
    with state.edit("a") as group:
        group.token_shard = 1
    tail = SampleTail(lease_id=grant.lease_id, num_tokens=2, finish_reason=STOP, is_sealed=True, score=scored(2.0))
    for _ in range(2):
        token_ends.take_reports(state, 1, [TailReport(group_id="a", sample_index=0, tail=tail)], 3.0)
    assert state.groups["a"].samples[0].score.value == 2.0
    assert lease_scoring(state, 9) == []


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_generator_has_an_environment_if_the_run_has_one(is_asked: bool) -> None:
    state, _ = run(policy=broker_pb2.RunPolicy(has_environment=is_asked))
    check_environment(broker_pb2.GeneratorHello(has_environment=is_asked), state.policy)
    with pytest.raises(InvalidFieldError, match=r"^hello\.has_environment: "):
        check_environment(broker_pb2.GeneratorHello(has_environment=not is_asked), state.policy)


def test_a_generator_rewards_nothing_in_a_run_without_an_environment() -> None:
    state, grants = run(policy=broker_pb2.RunPolicy())
    [error] = put(state, grants[0], [5], finish=STOP, score=scored())
    assert (error.reason, error.message.partition(":")[0]) == ("INVALID_FIELD", "score")


@pytest.mark.parametrize(
    ("finish", "score", "field"),
    [
        (types_pb2.FINISH_REASON_UNSPECIFIED, scored(), "score"),
        (ABORTED, scored(), "score"),
        (STOP, scored(math.nan), "score.value"),
        (STOP, scored(None), "score.value"),
        (STOP, scored(1.0, DIVERGED), "score.value"),
        (STOP, scored(turn_values=float32_bytes([math.inf])), "score.turn_values"),
        (STOP, scored(turn_values=bytes(4 * 4097)), "score.turn_values"),
    ],
)
def test_malformed_scores_are_refused(
    finish: types_pb2.FinishReason.ValueType, score: types_pb2.Score, field: str
) -> None:
    state, grants = run()
    [error] = put(state, grants[0], [5], finish=finish, score=score)
    assert (error.reason, field in error.message) == ("INVALID_FIELD", True)
