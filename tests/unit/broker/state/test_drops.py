"""Giving up: leased groups and puts by name, everything, and what a restarted sample keeps."""

from __future__ import annotations

import pytest

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import index_mask
from services.broker.operations import drops, submission
from services.broker.operations.lifecycle import reopen_run
from services.broker.state.run_audit import audit
from tests.helpers.brokers.broker import limits, prompt
from tests.helpers.brokers.trajectories import groups
from tests.unit.broker.builders import (
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
from tests.unit.broker.state.test_batches import check, put


def test_leased_groups_and_those_of_puts_are_dropped_by_name_and_counted_once() -> None:
    state = open_state(groups_per_step=8)
    make_ready(state, "a", "b")
    put(state, *groups("p", "q"))
    assert drops.drop_groups(state, ["a", "q", "nobody"], "poisoned") == 4
    assert audit(state).dropped == {"poisoned": 4}
    assert (set(state.groups), set(state.index.record_of)) == ({"b", "p"}, {"p"})
    assert drops.drop_groups(state, ["a", "q"], "poisoned") == 0
    check(state)


def test_everything_in_flight_is_given_up_and_what_was_trained_stays() -> None:
    state = open_state(groups_per_step=8, max_staleness=1)
    make_ready(state, "trained")
    put(state, *groups("put-trained"))
    deliver(state)
    acknowledge(state, ["trained", "put-trained"], 1)
    make_ready(state, "ready", version=1)
    put(state, *groups("put"))
    submit(state, "queued")
    submit(state, "evaluation", purpose=types_pb2.PURPOSE_EVALUATE)
    assert drops.drop_all(state, "run closed") == 8
    assert state.index.live == set()
    assert state.trained_ids(1) == {"trained", "put-trained"}
    # Evaluation is never in the books.
    assert audit(state).dropped == {"run closed": 6}
    check(state)


def test_of_a_step_that_the_store_lost_exactly_the_samples_that_the_trainer_names_count_as_trained() -> None:
    state = open_state(group_size=4)
    submit(state, "a")
    finish(state, lease(state, 4))
    for grant in lease_scoring(state, 4):
        is_lost = grant.sample[1] in (2, 3)
        score(state, grant, types_pb2.SCORE_STATUS_FAILED if is_lost else types_pb2.SCORE_STATUS_OK)
    assert audit(state).dropped == {"reward_failed": 2}
    step = broker_pb2.StepRecord(policy_version=1, group_ids=["a"], trained_samples=[index_mask([0, 2])])
    request = broker_pb2.OpenRunRequest(
        run_id="run-1", limits=limits(group_size=4), policy_version=1, steps=[step], takes_over=True
    )
    reopen_run(state, request, 7.0)
    trained, dropped = broker_pb2.SAMPLE_STATE_TRAINED, broker_pb2.SAMPLE_STATE_DROPPED
    samples = state.groups["a"].samples
    assert [sample.state for sample in samples] == [trained, dropped, trained, dropped]
    # One that the store takes for dropped was begun anew where the store lost it.
    assert [sample.attempt > 0 for sample in samples] == [False, False, True, False]
    assert (audit(state).submitted, audit(state).trained) == (5, 2)
    assert audit(state).dropped == {"reward_failed": 2, "not_trained": 1}
    check(state)


@pytest.mark.parametrize("forecast", [7.5, None])
def test_a_sample_restarted_keeps_its_forecast_and_nothing_else(forecast: float | None) -> None:
    state = open_state(groups_per_step=1, policy=broker_pb2.RunPolicy(stale=broker_pb2.STALE_POLICY_DROP))
    submission.submit(state, [prompt("a")], retired=(), now_s=1.0)
    with state.edit("a") as group:
        for sample in group.samples:
            sample.num_scoring_leases = 3
            if forecast is not None:
                sample.predicted_tokens = forecast
    finish(state, lease(state, 1))
    state.run.policy_version = 1
    drops.drop_stale(state)
    for sample in state.groups["a"].samples:
        assert sample.HasField("predicted_tokens") == (forecast is not None)
        sample.ClearField("predicted_tokens")
        assert sample == type(sample)(state=broker_pb2.SAMPLE_STATE_QUEUED, attempt=1)
