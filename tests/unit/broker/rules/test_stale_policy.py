"""What becomes of samples that the run's version leaves behind, under each stale policy."""

from __future__ import annotations

from typing import cast, get_args

import pytest

from penstock.errors import InvalidFieldError, RunConflictError
from penstock.staleness.policy import StalenessPolicy
from penstock.staleness.registry import POLICIES, PolicyName
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import scores
from services.broker.operations.leasing import Grant
from services.broker.operations.lifecycle import reopen_run
from services.broker.rules.limits import Limits
from services.broker.rules.sample_policy import Policy
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from services.generator.openai.sessions.session_admission import has_room
from tests.helpers.brokers.broker import limits
from tests.helpers.brokers.trajectories import group
from tests.unit.broker.builders import (
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    make_ready,
    open_state,
    put,
    score,
    submit,
)
from tests.unit.broker.rules.test_core_rules import _rule
from tests.unit.broker.state.test_batches import put as put_groups

WAIT, DROP = broker_pb2.STALE_POLICY_WAIT, broker_pb2.STALE_POLICY_DROP
CONTINUE = broker_pb2.STALE_POLICY_CONTINUE


def _limits() -> Limits:
    return Limits.from_proto(limits())


def test_an_unset_policy_is_every_default() -> None:
    found = Policy.from_proto(broker_pb2.RunPolicy(), _limits())
    assert (found.stale.number, found.partial_groups) == (WAIT, broker_pb2.PARTIAL_GROUP_POLICY_SHRINK)
    assert (found.drops_zero_variance, found.num_extra_samples) == (False, 0)
    assert (found.num_retained_steps, found.dispatch) == (64, "auto")
    assert found.max_retained_bytes == 4 * 1024**3
    assert Policy.from_proto(found.to_proto(), _limits()) == found


@pytest.mark.parametrize(
    ("policy", "group_size", "field"),
    [
        (broker_pb2.RunPolicy(stale=9), 2, "stale"),
        (broker_pb2.RunPolicy(partial_groups=9), 2, "partial_groups"),
        (broker_pb2.RunPolicy(drops_zero_variance=True), 1, "drops_zero_variance"),
        (broker_pb2.RunPolicy(num_extra_samples=1023), 2, "num_extra_samples"),
        (broker_pb2.RunPolicy(num_retained_steps=1025), 2, "num_retained_steps"),
        (broker_pb2.RunPolicy(max_retained_bytes=2**20 - 1), 2, "max_retained_bytes"),
        (broker_pb2.RunPolicy(max_retained_bytes=2**50 + 1), 2, "max_retained_bytes"),
        (broker_pb2.RunPolicy(dispatch="random"), 2, "dispatch"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_its_field(
    policy: broker_pb2.RunPolicy, group_size: int, field: str
) -> None:
    with pytest.raises(InvalidFieldError, match=rf"policy\.{field}: .*; must be "):
        Policy.from_proto(policy, Limits.from_proto(limits(group_size=group_size)))


def test_a_run_is_not_reopened_with_another_policy() -> None:
    state = open_state(policy=broker_pb2.RunPolicy(stale=DROP))
    same = broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(), policy=broker_pb2.RunPolicy(stale=DROP))
    assert reopen_run(state, same, 1.0).existed
    with pytest.raises(
        RunConflictError,
        match=r"policy\.stale: run 'run-1' was opened with STALE_POLICY_DROP, not with STALE_POLICY_WAIT",
    ):
        reopen_run(state, broker_pb2.OpenRunRequest(run_id="run-1", limits=limits()), 1.0)


def test_a_record_from_before_there_were_policies_means_every_default() -> None:
    state = open_state()
    state.run.ClearField("policy")
    state.settle()
    state.rollback()
    assert state.policy == Policy.from_proto(broker_pb2.RunPolicy(), state.limits)


@pytest.mark.parametrize("stale", [DROP, CONTINUE])
def test_a_lagging_generator_may_start_what_the_trainers_version_allows(
    stale: broker_pb2.StalePolicy.ValueType,
) -> None:
    def judge(generator: int, num_started: int) -> bool:
        rule = _rule(5, num_started, stale=stale)
        return rule.judge(generator_version=generator, min_version=None, prompt_min_version=None).is_allowed

    assert [judge(4, 7), judge(4, 8)] == [True, False]
    assert not judge(6, 0), "a version ahead of the run's"
    assert not judge(3, 0), "already beyond the bound: its tokens could never be trained on"
    join = _rule(5, 8, stale=stale).judge(generator_version=4, min_version=5, prompt_min_version=None)
    assert join.is_allowed


def _slow_and_ready(stale: broker_pb2.StalePolicy.ValueType) -> tuple[RunState, list[Grant]]:
    """At version 1: a group of version 0 still decoding, two of version 0 and one of version 1 ready; S = 1, B = 2."""
    state = open_state(groups_per_step=2, max_staleness=1, policy=broker_pb2.RunPolicy(stale=stale))
    submit(state, "slow")
    slow = lease(state, 2)
    make_ready(state, "a", "b", "c")
    acknowledge(state, deliver(state), 1)
    make_ready(state, "d", version=1)
    return state, slow


def test_drop_does_not_wait_for_a_due_group_and_begins_it_again() -> None:
    state, slow = _slow_and_ready(DROP)
    assert put(state, slow[0], [5, 6, 7]) == []
    assert deliver(state) == ["c", "d"]
    acknowledge(state, ["c", "d"], 2)
    books = audit(state)
    assert (books.dropped, books.submitted, books.in_flight) == ({"stale": 2}, 12, 2)
    assert books.balanced
    assert state.generation_leases == {}
    assert state.pending.cleared == {("slow", 0), ("slow", 1)}
    assert "slow" not in {sample[0] for sample, _chunk in state.pending.chunks}
    again = lease(state, 2, version=2)
    assert [(grant.sample, grant.attempt, grant.num_prefix_tokens) for grant in again] == [
        (("slow", 0), 1, 0),
        (("slow", 1), 1, 0),
    ]
    assert state.groups["slow"].submit_version == 2
    assert {grant.lease_id for grant in again}.isdisjoint(grant.lease_id for grant in slow)


def test_chunks_and_scores_of_the_attempt_before_are_lost() -> None:
    state, slow = _slow_and_ready(DROP)
    finish(state, slow[:1])
    [scoring_lease] = lease_scoring(state, 9)
    acknowledge(state, deliver(state), 2)
    assert [error.reason for error in put(state, slow[1], [5])] == ["LEASE_LOST"]
    assert score(state, scoring_lease).lost == [scoring_lease.lease_id]
    first, second = lease(state, 2, version=2)
    assert [error.reason for error in put(state, slow[1], [5])] == ["LEASE_LOST"]
    finish(state, [first, second], 2)
    again = lease_scoring(state, 9)
    assert [grant.attempt for grant in again] == [1, 1]
    assert score(state, scoring_lease).lost == [scoring_lease.lease_id]
    for grant in again:
        assert score(state, grant).accepted == [grant.lease_id]
    assert deliver(state) == ["slow"]
    receipt = acknowledge(state, ["slow"], 3)
    assert (receipt.num_samples, receipt.max_staleness_seen, audit(state).balanced) == (2, 0, True)


def test_continue_waits_for_a_due_group() -> None:
    state, slow = _slow_and_ready(CONTINUE)
    assert deliver(state) == ["c"]
    finish(state, slow)
    for grant in lease_scoring(state, 9):
        score(state, grant)
    assert deliver(state) == ["slow"]
    assert acknowledge(state, ["c", "slow"], 2).max_staleness_seen == 1
    assert audit(state).dropped == {}


def test_continue_drops_and_starts_again_what_does_not_fit_into_its_last_step() -> None:
    state = open_state(groups_per_step=1, max_staleness=1, policy=broker_pb2.RunPolicy(stale=CONTINUE))
    make_ready(state, "a", "b")
    acknowledge(state, deliver(state), 1)
    # Under WAIT a generator at version 0 could not start another now: b is due at version 1 and fills that step.
    submit(state, "late")
    late = lease(state, 2, version=0)
    assert len(late) == 2
    assert deliver(state) == ["b"]
    acknowledge(state, ["b"], 2)
    assert (audit(state).dropped, audit(state).balanced) == ({"stale": 2}, True)
    assert [grant.attempt for grant in lease(state, 2, version=2)] == [1, 1]


def test_wait_refuses_what_continue_admits() -> None:
    state = open_state(groups_per_step=1, max_staleness=1)
    make_ready(state, "a", "b")
    acknowledge(state, deliver(state), 1)
    submit(state, "late")
    assert lease(state, 2, version=0) == []


def test_a_group_in_the_trainers_hands_is_not_restarted() -> None:
    state = open_state(groups_per_step=2, max_staleness=0, policy=broker_pb2.RunPolicy(stale=DROP))
    make_ready(state, "a", "b")
    assert set(deliver(state)) == {"a", "b"}
    acknowledge(state, ["a"], 1)
    assert "b" not in state.groups
    assert (audit(state).dropped, audit(state).submitted) == ({"stale": 2}, 4)


def test_a_generator_beyond_the_bound_gets_no_part_of_a_group_restarted() -> None:
    state, _slow = _slow_and_ready(DROP)
    acknowledge(state, deliver(state), 2)
    assert lease(state, 2, version=0) == []
    assert lease(state, 2, version=1) != []


def test_samples_dropped_before_count_as_submitted_once_more() -> None:
    state = open_state(groups_per_step=1, group_size=3, max_staleness=0, policy=broker_pb2.RunPolicy(stale=DROP))
    submit(state, "slow")
    slow = lease(state, 3)
    finish(state, slow[:1])
    [first] = lease_scoring(state, 1)
    scores.accept_results(state, "worker-1", [_failed(first)], 5.0)
    assert audit(state).dropped == {"reward_failed": 1}
    state.run.policy_version = 1
    deliver(state)
    books = audit(state)
    assert (books.dropped, books.submitted, books.balanced) == ({"reward_failed": 1, "stale": 2}, 6, True)


def test_as_many_steps_are_retained_as_the_policy_says() -> None:
    state = open_state(groups_per_step=1, policy=broker_pb2.RunPolicy(num_retained_steps=2))
    for version in range(4):
        make_ready(state, f"g{version}", version=version)
        acknowledge(state, deliver(state), version + 1)
    assert sorted(state.index.trained) == [3, 4]
    request = broker_pb2.OpenRunRequest(
        run_id="run-1", limits=limits(), policy=state.policy.to_proto(), takes_over=True
    )
    request.limits.CopyFrom(state.limits.to_proto())
    request.policy_version = 1
    response = reopen_run(state, request, 2.0)
    assert (response.num_groups_rewound, response.num_samples_abandoned) == (2, 2)
    assert audit(state).balanced


def _failed(grant: scores.ScoringGrant) -> broker_pb2.ScoreResult:
    key = types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1])
    failed = types_pb2.Score(status=types_pb2.SCORE_STATUS_FAILED)
    return broker_pb2.ScoreResult(lease_id=grant.lease_id, key=key, score=failed)


class Overcommit(StalenessPolicy):
    """A fourth policy: a step's groups more than the trainer's version allows, joined by equals, dropped for good."""

    name = "overcommit"
    number = cast("broker_pb2.StalePolicy.ValueType", 99)
    keeps_places = False
    accepts_late_puts = True
    restarts_stale = False

    def start_version(self, *, trainer: int, generator: int, can_restart: bool = True) -> int:
        """See `StalenessPolicy.start_version`."""
        return trainer + 1 if can_restart else trainer

    def may_join(self, *, group: int, generator: int) -> bool:
        """See `StalenessPolicy.may_join`."""
        return group == generator


@pytest.fixture
def overcommit(monkeypatch: pytest.MonkeyPatch) -> broker_pb2.StalePolicy.ValueType:
    """The number of a policy that is registered and nothing more."""
    monkeypatch.setitem(POLICIES, Overcommit.number, Overcommit())
    return Overcommit.number


def test_the_names_of_configurations_are_those_of_the_policies() -> None:
    assert {policy.name for policy in POLICIES.values()} == set(get_args(PolicyName))
    numbers = {
        policy.name: broker_pb2.StalePolicy.Value(f"STALE_POLICY_{policy.name.upper()}") for policy in POLICIES.values()
    }
    assert {name: POLICIES[number].name for name, number in numbers.items()} == {name: name for name in numbers}
    assert set(POLICIES) == set(broker_pb2.StalePolicy.values()) - {broker_pb2.STALE_POLICY_UNSPECIFIED}


def test_admission_asks_a_registered_policy(overcommit: broker_pb2.StalePolicy.ValueType) -> None:
    def may(num_started: int, generator: int, group: int | None = None) -> bool:
        rule = _rule(5, num_started, stale=overcommit)
        return rule.judge(generator_version=generator, min_version=group, prompt_min_version=None).is_allowed

    assert [may(11, 4), may(12, 4), may(12, 5)] == [True, False, False]
    assert [may(13, 5, group=5), may(13, 5, group=4), may(13, 4, group=5)] == [True, False, False]


def test_delivery_and_drops_ask_a_registered_policy(overcommit: broker_pb2.StalePolicy.ValueType) -> None:
    state, slow = _slow_and_ready(overcommit)
    assert put(state, slow[0], [5, 6, 7]) == []
    assert deliver(state) == ["c", "d"], "no place is kept for the slow group"
    acknowledge(state, ["c", "d"], 2)
    assert "slow" not in state.groups
    books = audit(state)
    assert (books.dropped, books.submitted, books.in_flight, books.balanced) == ({"stale": 2}, 10, 0, True)


def test_puts_ask_a_registered_policy(overcommit: broker_pb2.StalePolicy.ValueType) -> None:
    def refusals(stale: broker_pb2.StalePolicy.ValueType) -> int:
        state = open_state(groups_per_step=1, max_staleness=0, policy=broker_pb2.RunPolicy(stale=stale))
        assert not put_groups(state, group("first")).errors
        return len(put_groups(state, group("late")).errors)

    assert [refusals(overcommit), refusals(WAIT)] == [0, 1]


def test_agents_ask_a_registered_policy(overcommit: broker_pb2.StalePolicy.ValueType) -> None:
    run = broker_pb2.GetRunResponse(
        limits=limits(groups_per_step=2, max_staleness=1),
        policy=broker_pb2.RunPolicy(stale=overcommit),
        policy_version=3,
    )
    assert [has_room(run, version=0, num_begun=number) for number in (9, 10)] == [True, False]
    for stale in (WAIT, DROP, CONTINUE):
        run.policy.stale = stale
        assert [has_room(run, version=0, num_begun=number) for number in (3, 4)] == [True, False]


def test_a_run_under_a_registered_policy_is_read_again(overcommit: broker_pb2.StalePolicy.ValueType) -> None:
    state = open_state(policy=broker_pb2.RunPolicy(stale=overcommit))
    state.settle()
    state.rollback()
    assert isinstance(state.policy.stale, Overcommit)
