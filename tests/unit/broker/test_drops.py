"""Giving up: single groups and parcels by name, everything, and what a sample begun anew keeps."""

from __future__ import annotations

import pytest

from penstock.v1 import broker_pb2, types_pb2
from services.broker import drops, submission
from services.broker.audit import audit
from tests.helpers.broker import prompt
from tests.helpers.trajectories import groups
from tests.unit.broker.builders import acknowledge, deliver, finish, lease, make_ready, open_state, submit
from tests.unit.broker.test_parcels import check, put


def test_groups_and_groups_in_parcels_are_dropped_by_name_and_counted_once() -> None:
    state = open_state(groups_per_step=8)
    make_ready(state, "a", "b")
    put(state, *groups("p", "q"))
    assert drops.drop_groups(state, ["a", "q", "nobody"], "poisoned") == 4
    assert audit(state).dropped == {"poisoned": 4}
    assert (set(state.groups), set(state.shelf.name_of)) == ({"b"}, {"p"})
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
    assert state.live == set()
    assert state.trained_ids(1) == {"trained", "put-trained"}
    # Evaluation is never in the books.
    assert audit(state).dropped == {"run closed": 6}
    check(state)


@pytest.mark.parametrize("forecast", [7.5, None])
def test_a_sample_begun_anew_keeps_its_forecast_and_nothing_else(forecast: float | None) -> None:
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
