"""Log-probs of a reference: a second lease of a sample that has its reward, and what is refused of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import float32_bytes
from penstock.wire.timestamps import timestamp
from services.broker.operations import drops, scores
from services.broker.operations.scores import ScoringGrant
from services.broker.records.stored_sample import read_sample, reference_element
from services.broker.stalls.causes import Present
from services.broker.stalls.stall_report import waits
from services.broker.state.queue_entry import REFERENCE, REWARD, num_waiting_for
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.unit.broker.builders import (
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    open_state,
    score,
    submit,
    suffix,
)

LOGPROBS = float32_bytes([-0.25, -1.5])


def opened(**changes: object) -> RunState:
    """A run that asks for log-probs, with a decoded group `a` of two samples of two tokens."""
    policy = broker_pb2.RunPolicy(needs_reference_logprobs=True, **changes)
    state = open_state(groups_per_step=1, policy=policy)
    submit(state, "a")
    finish(state, lease(state, 2))
    return state


def lease_reference(state: RunState, count: int = 9, *, now_s: float = 6.0) -> list[ScoringGrant]:
    return scores.lease_scoring(state, "scorer-1", max_leases=count, now_s=now_s, make_suffix=suffix, task=REFERENCE)


def report(state: RunState, grant: ScoringGrant, **fields: object) -> scores.Receipts:
    key = types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1])
    result = broker_pb2.ScoreResult(lease_id=grant.lease_id, key=key, **fields)
    scores.check_result(result)
    return scores.accept_results(state, "scorer-1", [result], 7.0)


def test_a_group_is_ready_once_rewards_and_log_probs_are_there():
    state = opened()
    assert lease_reference(state) == [], "a scorer comes after the reward"
    first, second = lease_scoring(state, 9)
    score(state, first)
    score(state, second)
    assert (lease_scoring(state, 9), deliver(state)) == ([], [])
    assert [num_waiting_for(state.finished, task) for task in (REWARD, REFERENCE)] == [0, 2]
    # The receipt of the reward was lost: it is known, although the sample waits again.
    assert score(state, first).num_repeated == 1
    one, other = lease_reference(state)
    assert report(state, one, reference_logprobs=LOGPROBS).accepted == [one.lease_id]
    assert deliver(state) == []
    report(state, other, reference_logprobs=LOGPROBS)
    assert report(state, other, reference_logprobs=LOGPROBS).num_repeated == 1
    assert deliver(state) == ["a"]
    state.keep()
    stored = [part for sample, part in state.delta().chunks if sample == ("a", 0)]
    assert read_sample(stored).reference_logprobs == LOGPROBS
    acknowledge(state, ["a"], 1)
    assert (audit(state).trained, audit(state).balanced) == (2, True)


def test_a_scorer_that_is_gone_loses_its_leases_to_another():
    state = opened()
    for grant in lease_scoring(state, 9):
        score(state, grant)
    lost = lease_reference(state)
    assert scores.expire_scoring(state, 6.0 + state.limits.scoring_lease_s + 1.0) == 2
    assert len(lease_reference(state, now_s=80.0)) == 2
    assert report(state, lost[0], reference_logprobs=LOGPROBS).lost == [lost[0].lease_id]


def test_a_sample_without_log_probs_is_dropped_by_its_reason():
    state = opened()
    for grant in lease_scoring(state, 9):
        score(state, grant)
    grant, _ = lease_reference(state)
    report(state, grant, score=types_pb2.Score(status=types_pb2.SCORE_STATUS_FAILED, message="too long"))
    assert audit(state).dropped[scores.REFERENCE_FAILED] == 1
    assert audit(state).balanced


def test_a_group_of_equal_rewards_is_dropped_before_a_scorer_sees_it():
    state = opened(drops_zero_variance=True)
    for grant in lease_scoring(state, 9):
        score(state, grant)
    assert lease_reference(state) == []
    assert audit(state).dropped == {drops.ZERO_VARIANCE: 2}


def test_evaluation_needs_no_log_probs():
    state = opened()
    submit(state, "e", purpose=types_pb2.PURPOSE_EVALUATE, group_size=1)
    finish(state, lease(state, 1))
    for grant in lease_scoring(state, 9):
        score(state, grant)
    assert {grant.sample[0] for grant in lease_reference(state)} == {"a"}
    assert state.index.first_ready(types_pb2.PURPOSE_EVALUATE, 9) == ["e"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"reference_logprobs": float32_bytes([-1.0])}, "results.reference_logprobs: '4 bytes'"),
        ({"reference_logprobs": float32_bytes([-1.0, np.nan])}, "reference_logprobs: 'NaN or infinity'"),
        ({"reference_logprobs": b"123"}, "reference_logprobs: 3 bytes"),
        ({"reference_logprobs": LOGPROBS, "score": types_pb2.Score()}, "score: "),
        ({"score": types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0)}, "results.score: 'a score'"),
    ],
)
def test_a_result_that_is_no_log_probs_of_the_sample_is_refused(fields, field):
    state = opened()
    for grant in lease_scoring(state, 9):
        score(state, grant)
    grant, _ = lease_reference(state)
    with pytest.raises(InvalidFieldError, match=f"^{field}"):
        report(state, grant, **fields)


def test_log_probs_are_no_reward():
    state = opened()
    grant, _ = lease_scoring(state, 9)
    key = types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1])
    result = broker_pb2.ScoreResult(lease_id=grant.lease_id, key=key, reference_logprobs=LOGPROBS)
    with pytest.raises(InvalidFieldError, match=r"^results\.reference_logprobs: "):
        scores.accept_results(state, "worker-1", [result], 5.0)


def test_completions_are_bounded_by_what_fits_a_message():
    policy = broker_pb2.RunPolicy(needs_reference_logprobs=True)
    open_state(policy=policy, max_completion_tokens=128 * 1024)
    with pytest.raises(InvalidFieldError, match=r"^policy\.needs_reference_logprobs: "):
        open_state(policy=policy, max_completion_tokens=128 * 1024 + 1)


def test_the_element_of_log_probs_is_found_among_others():
    chunk = types_pb2.TokenChunk(token_ids=b"\1\0\0\0", logprobs=b"\0\0\0\0", text="x").SerializeToString()
    for parts in ([chunk, reference_element(LOGPROBS)], [reference_element(LOGPROBS), chunk]):
        read = read_sample(parts)
        assert (read.reference_logprobs, read.text, read.token_ids) == (LOGPROBS, "x", b"\1\0\0\0")


def test_a_run_that_lacks_a_scorer_says_so():
    state = opened()
    for grant in lease_scoring(state, 9):
        score(state, grant)
    view = broker_pb2.GeneratorView(hello=broker_pb2.GeneratorHello(generator_id="gen-1"), beat_time=timestamp(10.0))
    alone = Present(generators=(view,), worker_ids=("worker-1",))
    [first, *_] = waits(state, alone, 10.0)
    assert (first.owner, "no scorer is connected; 2 finished samples wait" in first.reason) == ("scorers", True)
    together = replace(alone, scorer_ids=("scorer-1",))
    [first, *_] = waits(state, together, 10.0)
    assert (first.owner, "2 finished samples wait for a free scorer" in first.reason) == ("scorers", True)
    lease_reference(state)
    [first, *_] = waits(state, together, 10.0)
    assert (first.owner, "a/0 is scored by scorer-1" in first.reason) == ("scorer scorer-1", True)
    [first, *_] = waits(state, alone, 10.0)
    assert (first.owner, "scored by scorer-1, which is gone" in first.reason) == ("scorer scorer-1", True)
