"""Training groups that lose samples, draw too many, or earn the same reward for all."""

from __future__ import annotations

import pytest

from penstock.v1 import broker_pb2, types_pb2
from services.broker.assembly import messages
from services.broker.operations import leasing, scores
from services.broker.operations.scores import ScoringGrant
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.unit.broker.builders import (
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    open_state,
    put,
    submit,
)
from tests.unit.broker.builders import score as score_one

FAILED = types_pb2.SCORE_STATUS_FAILED
WAIT, DROP = broker_pb2.PARTIAL_GROUP_POLICY_WAIT, broker_pb2.PARTIAL_GROUP_POLICY_DROP
SHRINK = broker_pb2.PARTIAL_GROUP_POLICY_SHRINK


def _open(*, group_size: int = 3, max_leases: int = 8, **policy: object) -> RunState:
    return open_state(
        group_size=group_size,
        max_leases_per_sample=max_leases,
        policy=broker_pb2.RunPolicy(**policy),  # type: ignore[arg-type]
    )


def _finished(state: RunState, *group_ids: str) -> list[ScoringGrant]:
    submit(state, *group_ids)
    finish(state, lease(state, 99))
    return lease_scoring(state, 99)


def _score(state: RunState, grant: ScoringGrant, value: float) -> scores.Receipts:
    result = broker_pb2.ScoreResult(
        lease_id=grant.lease_id,
        key=types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1]),
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=value),
    )
    return scores.accept_results(state, "worker-1", [result], 5.0)


def _books(state: RunState) -> tuple[int, int, dict[str, int], int]:
    books = audit(state)
    assert books.balanced, books
    return books.submitted, books.trained, dict(books.dropped), books.in_flight


# -- partial groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SHRINK, broker_pb2.PARTIAL_GROUP_POLICY_UNSPECIFIED])
def test_shrink_trains_on_what_is_left(policy: broker_pb2.PartialGroupPolicy.ValueType) -> None:
    state = _open(partial_groups=policy)
    first, *others = _finished(state, "a")
    score_one(state, first, FAILED)
    for grant in others:
        score_one(state, grant)
    assert deliver(state) == ["a"]
    acknowledge(state, ["a"], 1)
    assert _books(state) == (3, 2, {"reward_failed": 1}, 0)


def test_drop_gives_the_whole_group_up_at_its_first_lost_sample() -> None:
    state = _open(partial_groups=DROP)
    first, *others = _finished(state, "a")
    score_one(state, first, FAILED)
    assert state.groups == {}
    assert _books(state) == (3, 0, {"reward_failed": 1, "group_incomplete": 2}, 0)
    assert score_one(state, others[0]).lost == [others[0].lease_id]


def test_wait_begins_a_lost_sample_again_and_trains_on_the_whole_group() -> None:
    state = _open(partial_groups=WAIT)
    first, *others = _finished(state, "a")
    score_one(state, first, FAILED)
    for grant in others:
        score_one(state, grant)
    assert deliver(state) == [], "the group waits for its third sample"
    assert _books(state) == (4, 0, {"reward_failed": 1}, 3)
    [again] = lease(state, 9)
    assert (again.sample, again.attempt, again.num_prefix_tokens) == (first.sample, 1, 0)
    finish(state, [again])
    score_one(state, lease_scoring(state, 1)[0])
    assert deliver(state) == ["a"]
    acknowledge(state, ["a"], 1)
    assert _books(state) == (4, 3, {"reward_failed": 1}, 0)


def test_wait_gives_a_group_up_whose_sample_was_lost_too_often() -> None:
    state = _open(partial_groups=WAIT, max_leases=2)
    first, *others = _finished(state, "a")
    for grant in others:
        score_one(state, grant)
    score_one(state, first, FAILED)
    finish(state, lease(state, 1))
    [second] = lease_scoring(state, 1)
    assert second.attempt == 1
    score_one(state, second, FAILED)
    assert state.groups == {}
    assert _books(state) == (4, 0, {"reward_failed": 2, "too_many_attempts": 2}, 0)


def test_wait_begins_a_sample_again_that_had_too_many_leases() -> None:
    state = _open(partial_groups=WAIT, max_leases=2)
    submit(state, "a")
    for now_s in (0.0, 100.0):
        [grant, *_others] = lease(state, 1, now_s=now_s)
        assert put(state, grant, [1], offset=grant.num_prefix_tokens) == []
        leasing.expire(state, now_s + 31)
    assert _books(state) == (4, 0, {"too_many_leases": 1}, 3)
    assert [(grant.attempt, grant.num_prefix_tokens) for grant in lease(state, 1, now_s=200.0)] == [(1, 0)]


@pytest.mark.parametrize("policy", [WAIT, DROP])
def test_evaluation_groups_keep_what_they_have_under_every_policy(
    policy: broker_pb2.PartialGroupPolicy.ValueType,
) -> None:
    state = _open(partial_groups=policy)
    submit(state, "e", purpose=types_pb2.PURPOSE_EVALUATE, group_size=2)
    finish(state, lease(state, 2))
    first, second = lease_scoring(state, 2)
    score_one(state, first, FAILED)
    score_one(state, second)
    assert state.index.first_ready(types_pb2.PURPOSE_EVALUATE, 9) == ["e"]
    assert _books(state) == (0, 0, {}, 0)


# -- dynamic filtering -------------------------------------------------------------------------------------------------


def test_groups_whose_rewards_are_all_equal_are_filtered_out() -> None:
    state = _open(group_size=2, drops_zero_variance=True)
    grants = _finished(state, "same", "mixed")
    for grant, value in zip(grants, (1.0, 1.0, 1.0, 0.0), strict=True):
        assert _score(state, grant, value).lost == []
    assert deliver(state) == ["mixed"]
    assert _books(state) == (4, 0, {"zero_variance": 2}, 2)
    assert state.pending.retired == {"same"}


def test_lost_samples_do_not_count_for_the_variance() -> None:
    state = _open(drops_zero_variance=True)
    first, second, third = _finished(state, "a")
    _score(state, first, 0.0)
    score_one(state, second, FAILED)
    _score(state, third, 0.0)
    assert _books(state) == (3, 0, {"reward_failed": 1, "zero_variance": 2}, 0)


def test_without_the_policy_equal_rewards_are_delivered() -> None:
    state = _open(group_size=2)
    for grant in _finished(state, "same"):
        _score(state, grant, 1.0)
    assert deliver(state) == ["same"]


# -- oversampling ------------------------------------------------------------------------------------------------------


def test_the_first_samples_to_be_scored_make_the_group_and_the_rest_is_aborted() -> None:
    state = _open(group_size=2, num_extra_samples=2)
    submit(state, "a")
    grants = lease(state, 9)
    assert len(grants) == 4
    assert put(state, grants[0], [1, 2]) == []
    finish(state, grants[2:])
    late, *scored = [*lease_scoring(state, 9)]
    assert scored, late
    assert score_one(state, late).accepted
    assert set(state.generation_leases["gen-1"]) == {grants[0].lease_id, grants[1].lease_id}
    assert score_one(state, scored[0]).accepted
    assert _books(state) == (4, 0, {"oversampled": 2}, 2)
    assert state.generation_leases == {}, "what still decodes is revoked"
    assert ("a", 0) in state.pending.cleared
    assert [error.reason for error in put(state, grants[0], [3], offset=2)] == ["LEASE_LOST"]
    assert deliver(state) == ["a"]
    assert messages.kept_indices(state.groups["a"]) == [2, 3]
    acknowledge(state, ["a"], 1)
    assert _books(state) == (4, 2, {"oversampled": 2}, 0)


def test_a_result_beyond_the_group_size_is_not_used() -> None:
    state = _open(group_size=2, num_extra_samples=1)
    first, second, third = _finished(state, "a")
    for grant in (first, second):
        assert score_one(state, grant).accepted
    assert score_one(state, third).lost == [third.lease_id]
    assert _books(state) == (3, 0, {"oversampled": 1}, 2)


@pytest.mark.parametrize("policy", [WAIT, DROP, SHRINK])
def test_a_group_is_as_large_as_its_prompt_asked(policy: broker_pb2.PartialGroupPolicy.ValueType) -> None:
    state = _open(group_size=4, num_extra_samples=1, partial_groups=policy)
    submit(state, "a", group_size=2)
    finish(state, lease(state, 9))
    first, second, third = lease_scoring(state, 9)
    score_one(state, first, FAILED)
    for grant in (second, third):
        assert score_one(state, grant).accepted
    assert deliver(state) == ["a"]
    assert _books(state) == (3, 0, {"reward_failed": 1}, 2)


def test_the_only_reward_of_a_group_of_one_is_no_lack_of_variance() -> None:
    state = _open(group_size=3, drops_zero_variance=True)
    submit(state, "one", group_size=1)
    finish(state, lease(state, 9))
    (grant,) = lease_scoring(state, 9)
    assert score_one(state, grant).accepted
    assert deliver(state) == ["one"]


@pytest.mark.parametrize("policy", [WAIT, DROP, SHRINK])
def test_an_extra_sample_takes_the_place_of_a_lost_one(policy: broker_pb2.PartialGroupPolicy.ValueType) -> None:
    state = _open(group_size=2, num_extra_samples=1, partial_groups=policy)
    first, second, third = _finished(state, "a")
    score_one(state, first, FAILED)
    for grant in (second, third):
        assert score_one(state, grant).accepted
    assert deliver(state) == ["a"]
    assert _books(state) == (3, 0, {"reward_failed": 1}, 2)


def test_a_second_lost_sample_is_beyond_one_extra() -> None:
    state = _open(group_size=2, num_extra_samples=1, partial_groups=WAIT)
    first, second, _third = _finished(state, "a")
    score_one(state, first, FAILED)
    score_one(state, second, FAILED)
    assert _books(state) == (4, 0, {"reward_failed": 2}, 2)
    assert [grant.sample for grant in lease(state, 9)] == [second.sample]


def test_evaluation_groups_draw_no_extra_samples() -> None:
    state = _open(group_size=2, num_extra_samples=5)
    submit(state, "e", purpose=types_pb2.PURPOSE_EVALUATE, group_size=3)
    assert len(state.groups["e"].samples) == 3
