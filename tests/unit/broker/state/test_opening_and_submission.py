from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidFieldError, RunClosedError, RunConflictError, VersionConflictError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import submission
from services.broker.operations.lifecycle import create_run, reopen_run
from services.broker.state import tallies
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import evaluation, limits, prompt
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


def _reopen(
    state: RunState,
    version: int,
    *steps: tuple[int, list[str]],
    policy: broker_pb2.RunPolicy | None = None,
    **changes: Any,
) -> broker_pb2.OpenRunResponse:
    records = [broker_pb2.StepRecord(policy_version=number, group_ids=names) for number, names in steps]
    request = broker_pb2.OpenRunRequest(
        run_id="run-1",
        limits=limits(**changes),
        policy_version=version,
        steps=records,
        policy=policy,
        takes_over=True,
    )
    return reopen_run(state, request, 7.0)


def _train(state: RunState, version: int, *names: str) -> None:
    make_ready(state, *names, version=version)
    assert set(deliver(state)) == set(names)
    acknowledge(state, list(names), version + 1)


def test_reopening_with_the_same_version_changes_nothing_but_closing() -> None:
    state = open_state()
    submit(state, "a")
    state.run.is_closed = True
    response = _reopen(state, 0)
    assert (response.existed, response.num_groups_in_flight, response.history) == (True, 1, 0)
    assert not state.run.is_closed


def test_reopening_with_other_limits_is_refused() -> None:
    with pytest.raises(RunConflictError):
        _reopen(open_state(), 0, max_staleness=3)


def test_a_rewind_hands_later_steps_out_again() -> None:
    state = open_state()
    _train(state, 0, "a", "b")
    _train(state, 1, "c", "d")
    response = _reopen(state, 1)
    assert (response.num_groups_rewound, response.history, response.policy_version) == (2, 1, 1)
    assert (audit(state).trained, audit(state).in_flight, audit(state).balanced) == (4, 4, True)
    assert set(deliver(state)) == {"c", "d"}
    acknowledge(state, ["c", "d"], 2)
    assert (audit(state).trained, audit(state).trained_by_staleness) == (8, {0: 8})


def test_a_rewind_discards_tokens_of_weights_that_are_no_more() -> None:
    state = open_state(max_staleness=1)
    _train(state, 0, "a", "b")
    _train(state, 1, "c", "d")
    submit(state, "e")
    running = lease(state, 2, 2)
    assert len(running) == 2
    response = _reopen(state, 0, max_staleness=1)
    assert response.num_groups_rewound == 4
    assert deliver(state) == ["a", "b"]
    acknowledge(state, ["a", "b"], 1)
    assert deliver(state) == []
    grants = lease(state, 99, 1)
    assert {grant.sample[0] for grant in grants} >= {"c", "d"}
    assert all(grant.num_prefix_tokens == 0 for grant in grants)
    assert audit(state).balanced


def test_a_rewind_takes_back_what_is_being_decoded_whatever_its_lease_was_given_for() -> None:
    """Its generator may have taken the abandoned weights in flight, and call them by the number of the next ones."""
    state = open_state(max_staleness=1)
    _train(state, 0, "a", "b")
    submit(state, "e")
    running = lease(state, 2, 1)
    assert put(state, running[0], [5], version=1) == []
    _train(state, 1, "c", "d")
    _reopen(state, 1, max_staleness=1)
    assert set(deliver(state)) == {"c", "d"}
    acknowledge(state, ["c", "d"], 2)
    [error] = put(state, running[0], [6], version=2, offset=1)
    assert (error.reason, error.next_offset) == ("LEASE_LOST", 1)
    again = lease(state, 2, 2)
    assert [grant.num_prefix_tokens for grant in again] == [1, 0]
    assert audit(state).balanced


def test_a_rewind_discards_what_abandoned_weights_said_in_an_evaluation() -> None:
    state = open_state()
    _train(state, 0, "a", "b")
    submission.submit(state, [evaluation("e")], retired=(), now_s=1.0)
    finish(state, lease(state, 1, 1), 1)
    _reopen(state, 0)
    assert [sample.num_tokens for sample in state.groups["e"].samples] == [0]
    [grant] = lease(state, 1, 0)
    assert (grant.sample, grant.attempt, grant.num_prefix_tokens) == (("e", 0), 1, 0)


def test_a_rewind_does_not_stall_a_synchronous_run() -> None:
    state = open_state(groups_per_step=1)
    for version in range(5):
        _train(state, version, f"g{version}")
    _reopen(state, 3, groups_per_step=1)
    assert deliver(state) == ["g3"]
    acknowledge(state, ["g3"], 4)
    finish(state, lease(state, 9, 4), 4)
    for grant in lease_scoring(state, 9):
        score(state, grant)
    assert deliver(state) == ["g4"]


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_rewind_beyond_the_retention_drops_what_is_gone_and_goes_on(version: int) -> None:
    policy = broker_pb2.RunPolicy(num_retained_steps=2)
    state = open_state(policy=policy)
    for step in range(5):
        _train(state, step, f"a{step}", f"b{step}")
    response = _reopen(state, version, policy=policy)
    num_gone = 4 * (3 - version)
    assert (response.num_groups_rewound, response.num_samples_abandoned) == (4, num_gone)
    books = audit(state)
    assert (books.trained, books.dropped.get("abandoned_step", 0), books.in_flight) == (4 * version, num_gone, 8)
    assert books.balanced
    assert not any(step > version for step in state.tallies)
    for step in range(version, version + 5):
        _train(state, step, f"c{step}", f"d{step}") if step >= version + 2 else _finish_step(state, step)
    books = audit(state)
    assert (books.trained, books.in_flight, books.balanced) == (4 * (version + 5), 0, True)
    assert _reopen(state, version, policy=policy).num_samples_abandoned == 12
    assert (audit(state).trained, audit(state).balanced) == (4 * version, True)


def _finish_step(state: RunState, version: int) -> None:
    """Train on two groups that were handed out again; what abandoned weights sampled is sampled anew."""
    finish(state, lease(state, 100, version), version)
    for grant in lease_scoring(state, 100):
        score(state, grant)
    acknowledge(state, deliver(state), version + 1)


def test_a_rewind_behind_the_oldest_tally_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "MAX_TALLIES", 2)
    policy = broker_pb2.RunPolicy(num_retained_steps=1)
    state = open_state(policy=policy)
    for step in range(5):
        _train(state, step, f"a{step}", f"b{step}")
    with pytest.raises(VersionConflictError, match=r"taken back to 2 at most.*penstock runs delete run-1"):
        _reopen(state, 1, policy=policy)
    assert state.run.policy_version == 5
    assert _reopen(state, 2, policy=policy).num_samples_abandoned == 8
    assert (audit(state).trained, audit(state).balanced) == (8, True)


def test_a_broker_that_lost_its_last_step_catches_up() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    deliver(state)
    response = _reopen(state, 2, (1, ["a", "b"]), (2, ["lost"]))
    assert (response.policy_version, response.num_groups_in_flight) == (2, 0)
    assert (audit(state).trained, audit(state).submitted, audit(state).balanced) == (6, 6, True)
    assert state.pending.retired == {"lost"}


def test_what_a_lost_end_hides_is_neither_called_stale_nor_handed_out_again() -> None:
    """The store knows of the groups only that they were begun at version 0; the trainer trained on them later."""
    state = open_state(max_staleness=1)
    submit(state, "a", "b", "c")
    [first, *_rest] = lease(state, 5, 0)
    put(state, first, [1])
    _reopen(state, 6, (5, ["a"]), (6, ["b"]), max_staleness=1)
    books = audit(state)
    assert (books.trained, books.max_staleness_seen, books.balanced) == (4, 0, True)
    _reopen(state, 4, max_staleness=1)
    assert (audit(state).trained, audit(state).balanced) == (0, True)
    assert deliver(state) == []
    grants = lease(state, 9, 4)
    assert {grant.sample[0] for grant in grants} >= {"a", "b"}
    assert all(grant.num_prefix_tokens == 0 for grant in grants)


def test_a_new_run_of_a_resumed_trainer_starts_at_its_version() -> None:
    state = RunState()
    steps = [broker_pb2.StepRecord(policy_version=9, group_ids=["old"])]
    request = broker_pb2.OpenRunRequest(run_id="r", limits=limits(), policy_version=9, steps=steps)
    assert create_run(state, request, 1.0).policy_version == 9
    assert state.pending.retired == {"old"}
    state.settle()
    submit(state, "a")
    assert len(lease(state, 9, 9)) == 2


@pytest.mark.parametrize("versions", [[2, 1], [1, 1], [0], [4]])
def test_steps_out_of_order_are_refused(versions: list[int]) -> None:
    with pytest.raises(InvalidFieldError):
        _reopen(open_state(), 3, *((version, ["g"]) for version in versions))


@pytest.mark.parametrize(
    "changes",
    [
        {"groups_per_step": 0},
        {"group_size": 0},
        {"max_completion_tokens": 0},
        {"max_staleness": 5000},
        {"generation_lease": {"seconds": 0, "nanos": 1}},
    ],
)
def test_impossible_limits_are_refused(changes: dict[str, Any]) -> None:
    request = broker_pb2.OpenRunRequest(run_id="r", limits=limits(**changes), takes_over=True)
    with pytest.raises(InvalidFieldError):
        create_run(RunState(), request, 0.0)


def test_submitting_again_has_no_effect() -> None:
    state = open_state()
    assert submit(state, "a") == []
    state.settle()
    assert submit(state, "a") == []
    assert submission.submit(state, [prompt("gone")], retired={"gone"}, now_s=1.0) == []
    assert (state.is_changed, audit(state).submitted) == (False, 2)


def test_a_full_queue_refuses_the_rest_and_keeps_purposes_apart() -> None:
    state = open_state(max_queued_groups=2)
    errors = submit(state, "a", "b", "c")
    assert [(error.index, error.reason, error.code) for error in errors] == [(2, "QUEUE_FULL", 8)]
    assert submit(state, "e", purpose=types_pb2.PURPOSE_EVALUATE) == []
    lease(state, 1)
    assert submit(state, "c")[0].reason == "QUEUE_FULL"
    lease(state, 9)
    assert submit(state, "c") == []


def test_a_closed_run_takes_no_prompts_and_gives_no_leases() -> None:
    state = open_state()
    submit(state, "a")
    state.run.is_closed = True
    assert lease(state, 9) == []
    with pytest.raises(RunClosedError):
        submit(state, "b")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"group_id": ""}, "group_id"),
        ({"group_id": "g" * 129}, "group_id"),
        ({"group_id": "a\nb"}, "group_id"),
        ({"token_ids": b""}, "token_ids"),
        ({"token_ids": b"123"}, "token_ids"),
        ({"token_ids": b"\xff\xff\xff\xff"}, "token_ids"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 3}, "group_size"),
        ({"purpose": 0}, "purpose"),
        ({"purpose": 7}, "purpose"),
        ({"min_policy_version": -1}, "min_policy_version"),
        ({"sampling": types_pb2.SamplingParams()}, "max_new_tokens"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=65)}, "max_new_tokens"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, temperature=float("nan"))}, "temperature"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, temperature=-1)}, "temperature"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, top_p=0)}, "top_p"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, top_k=0)}, "top_k"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, stop_token_ids=[1] * 65)}, "stop_token_ids"),
        (
            {"sampling": types_pb2.SamplingParams(max_new_tokens=1, top_p=0.9)},
            "sampling.top_p: 0.9; must be unset",
        ),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, top_k=50)}, "sampling.top_k: 50; must be unset"),
        ({"sampling": types_pb2.SamplingParams(max_new_tokens=1, temperature=0)}, "sampling.temperature: 0.0; must be"),
        ({"messages": [types_pb2.ChatMessage(role="oracle")]}, "role"),
        ({"metadata_json": "[1]"}, "metadata_json"),
        ({"metadata_json": "{"}, "metadata_json"),
        ({"metadata_json": '{"a": "' + "x" * 70_000 + '"}'}, "metadata_json"),
    ],
)
def test_a_malformed_prompt_is_refused_by_name_and_the_others_are_taken(changes: dict[str, Any], field: str) -> None:
    state = open_state()
    bad = prompt(**({"group_id": "bad"} | changes))
    errors = submission.submit(state, [prompt("good"), bad], retired=(), now_s=1.0)
    assert [(error.index, error.code, error.reason) for error in errors] == [(1, 3, "INVALID_FIELD")]
    assert field in errors[0].message
    assert list(state.groups) == ["good"]


def test_only_what_is_trained_on_must_be_drawn_from_the_whole_distribution() -> None:
    state = open_state()
    cut = types_pb2.SamplingParams(max_new_tokens=1, temperature=0, top_p=0.9, top_k=50)
    hot = types_pb2.SamplingParams(max_new_tokens=1, temperature=0.01, top_p=1.0)
    prompts = [evaluation("measured", sampling=cut), prompt("trained", sampling=hot)]
    assert submission.submit(state, prompts, retired=(), now_s=1.0) == []
