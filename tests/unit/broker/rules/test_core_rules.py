from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from penstock.v1 import broker_pb2
from services.broker.rules.admission import AdmissionRule, judge_evaluation
from services.broker.rules.batching import ReadyGroup, StepView, choose
from services.broker.rules.limits import Limits
from services.broker.rules.sample_policy import Policy
from services.broker.runtime.metrics import BrokerMetrics
from tests.helpers.brokers.broker import limits
from tests.unit.broker.builders import acknowledge, deliver, make_ready, open_state, submit


def _limits(**changes: int) -> Limits:
    return Limits.from_proto(limits(**changes))


def _rule(
    version: int,
    num_started: int,
    *,
    staleness: int = 1,
    groups: int = 4,
    stale: broker_pb2.StalePolicy.ValueType = broker_pb2.STALE_POLICY_WAIT,
) -> AdmissionRule:
    found = _limits(max_staleness=staleness, groups_per_step=groups)
    policy = Policy.from_proto(broker_pb2.RunPolicy(stale=stale), found)
    return AdmissionRule(limits=found, policy=policy, policy_version=version, num_started=num_started)


@pytest.mark.parametrize(
    ("version", "generator", "staleness", "most"),
    [(0, 0, 0, 4), (0, 0, 1, 8), (5, 5, 1, 8), (5, 4, 1, 4), (5, 3, 1, 0), (5, 1, 4, 4)],
)
def test_admission_counts_whole_steps_ahead(version: int, generator: int, staleness: int, most: int) -> None:
    assert _rule(version, 0, staleness=staleness).max_started(generator) == most


def test_the_last_admitted_group_is_the_one_that_fills_the_bound() -> None:
    judged = [
        _rule(0, started).judge(generator_version=0, min_version=None, prompt_min_version=None) for started in (7, 8)
    ]
    assert [verdict.is_allowed for verdict in judged] == [True, False]


def test_a_started_group_goes_on_even_when_nothing_new_may_start() -> None:
    assert _rule(0, 8).judge(generator_version=0, min_version=0, prompt_min_version=None).is_allowed


def test_an_older_generator_may_join_a_started_group_only_if_its_own_bound_holds_it() -> None:
    assert _rule(1, 4).judge(generator_version=0, min_version=1, prompt_min_version=None).is_allowed
    assert not _rule(1, 5).judge(generator_version=0, min_version=1, prompt_min_version=None).is_allowed


def test_a_lagging_generator_helps_on_a_group_that_is_as_old_already() -> None:
    """Where it could start none: the group does not get older by it."""
    rule = _rule(5, 8)
    assert not rule.judge(generator_version=4, min_version=None, prompt_min_version=None).is_allowed
    assert rule.judge(generator_version=4, min_version=4, prompt_min_version=None).is_allowed
    assert not rule.judge(generator_version=4, min_version=5, prompt_min_version=None).is_allowed


def test_a_prompt_may_ask_for_a_version_and_a_refusal_names_it() -> None:
    rule = _rule(5, 0)
    judged = [
        (
            rule.judge(generator_version=generator, min_version=None, prompt_min_version=5),
            judge_evaluation(generator_version=generator, prompt_min_version=5),
        )
        for generator in (4, 5)
    ]
    assert [(train.is_allowed, evaluation.is_allowed) for train, evaluation in judged] == [(False,) * 2, (True,) * 2]
    for verdict in judged[0]:
        assert "asks for version 5, the generator holds 4" in verdict.reason


def _ready(name: str, deadline: int, sequence: int = 0, tokens: int = 10) -> ReadyGroup:
    return ReadyGroup(group_id=name, deadline=deadline, sequence=sequence, num_groups=1, num_tokens=tokens)


def _step(version: int, *, delivered: int = 0, due: int = 0, groups: int = 2) -> StepView:
    return StepView(
        limits=_limits(groups_per_step=groups, max_staleness=2),
        policy_version=version,
        num_delivered=delivered,
        num_due=due,
    )


def _chosen(ready: list[ReadyGroup], step: StepView, *, max_groups: int, target_tokens: int) -> list[str]:
    return [name for name, _count in choose(ready, step, max_groups=max_groups, target_tokens=target_tokens)]


def test_due_groups_go_first_then_by_submission() -> None:
    ready = [_ready("late", 9, 2), _ready("early", 9, 1), _ready("due", 4, 3)]
    assert _chosen(ready, _step(4, due=1, groups=3), max_groups=9, target_tokens=0) == ["due", "early", "late"]


def test_places_are_kept_for_due_groups_that_are_not_ready() -> None:
    ready = [_ready("a", 9), _ready("b", 9)]
    assert _chosen(ready, _step(4, due=1), max_groups=9, target_tokens=0) == ["a"]
    assert _chosen(ready, _step(4, due=2), max_groups=9, target_tokens=0) == []
    assert _chosen(ready, _step(4, delivered=1, due=1), max_groups=9, target_tokens=0) == []


def test_a_microbatch_stops_at_its_limits() -> None:
    ready = [_ready(name, 4) for name in "abc"]
    assert _chosen(ready, _step(4, due=3, groups=9), max_groups=2, target_tokens=0) == ["a", "b"]
    assert _chosen(ready, _step(4, due=3, groups=9), max_groups=9, target_tokens=15) == ["a", "b"]


def test_a_microbatch_of_exactly_the_tokens_asked_for_is_full() -> None:
    ready = [_ready(name, 4) for name in "abc"]
    step = _step(4, due=3, groups=9)
    assert _chosen(ready, step, max_groups=9, target_tokens=20) == ["a", "b"]
    assert _chosen(ready, step, max_groups=9, target_tokens=11) == ["a", "b"]


def _put(name: str, num_groups: int, tokens: int, sequence: int = 0) -> ReadyGroup:
    return ReadyGroup(group_id=name, deadline=4, sequence=sequence, num_groups=num_groups, num_tokens=tokens)


@pytest.mark.parametrize(
    ("ready", "target_tokens", "chosen"),
    [
        ([_put("p", 2, 20)], 10, [("p", 1)]),
        ([_ready("a", 4), _put("p", 4, 40, 1)], 30, [("a", 1), ("p", 2)]),
        ([_put("p", 2, 20), _ready("a", 4, 1)], 20, [("p", 2)]),
        ([_put("p", 2, 20), _ready("a", 4, 1)], 21, [("p", 2), ("a", 1)]),
    ],
    ids=["cut", "cut after a group", "whole and full", "whole and not full"],
)
def test_of_a_put_as_many_groups_are_chosen_as_hold_the_tokens(
    ready: list[ReadyGroup], target_tokens: int, chosen: list[tuple[str, int]]
) -> None:
    assert choose(ready, _step(4, due=9, groups=9), max_groups=9, target_tokens=target_tokens) == chosen


def test_unset_limits_get_the_documented_defaults() -> None:
    found = _limits(groups_per_step=32)
    assert (found.max_queued_groups, found.max_leases_per_sample) == (128, 8)
    assert (found.generation_lease_s, found.scoring_lease_s) == (30.0, 60.0)
    assert _limits().max_queued_groups == 64
    assert Limits.from_proto(found.to_proto()) == found
    assert isinstance(found.to_proto(), broker_pb2.RunLimits)


def test_metrics_follow_a_run() -> None:
    registry = CollectorRegistry()
    metrics, state = BrokerMetrics(registry), open_state()
    make_ready(state, "a", "b")
    acknowledge(state, deliver(state), 1)
    submit(state, "c")
    metrics.tokens.inc(12)
    metrics.observe(state, num_conflicts=3)
    assert registry.get_sample_value("penstock_broker_tokens_accepted_total") == 12
    trained = {"run": "run-1", "staleness_versions": "0"}
    assert registry.get_sample_value("penstock_broker_samples_trained", trained) == 4
    queued = {"run": "run-1", "state": "queued"}
    assert registry.get_sample_value("penstock_broker_samples_in_flight", queued) == 2
    assert registry.get_sample_value("penstock_broker_commit_conflicts", {"run": "run-1"}) == 3
