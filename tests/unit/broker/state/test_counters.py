"""The books by submission version and length."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from penstock.v1 import broker_pb2
from services.broker.operations import drops
from services.broker.operations.lifecycle import reopen_run
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.state import counters
from services.broker.state.counters import Entry, folded, length_bucket
from services.broker.state.run_audit import audit_rows
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import limits
from tests.unit.broker.builders import acknowledge, deliver, lease, make_ready, open_state, put, submit

Row = tuple[int, int, int, dict[str, int], int]


def _counts(state: RunState) -> dict[str, int]:
    """What a store would hold: these tests never settle."""
    pending = state.pending
    return pending.counts if pending.fold_version is None else folded(pending.counts, pending.fold_version)


def _rows(state: RunState) -> list[Row]:
    found = audit_rows(state, _counts(state))
    assert found.balanced, found
    return [(row.submit_version, row.max_tokens, row.trained, dict(row.dropped), row.in_flight) for row in found.rows]


def _submitted(state: RunState) -> dict[int, int]:
    found = audit_rows(state, _counts(state))
    return {row.submit_version: row.submitted for row in found.submitted_by_version}


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1024, 1024)]
)
def test_lengths_fall_into_powers_of_two(num_tokens: int, bucket: int) -> None:
    assert length_bucket(num_tokens) == bucket


def test_a_counters_name_says_what_it_counts() -> None:
    for entry in (
        Entry(7, 0, counters.SUBMITTED),
        Entry(7, 64, counters.TRAINED),
        Entry(0, 8, counters.DROPPED, "stale"),
    ):
        assert Entry.parse(entry.name) == entry


def test_rows_show_what_was_dropped_by_version_and_length() -> None:
    state = open_state(groups_per_step=1, max_staleness=1)
    make_ready(state, "trained")
    submit(state, "cut", "waits")
    grants = lease(state, 2)
    assert put(state, grants[0], [1, 2, 3, 4, 5]) == []
    acknowledge(state, deliver(state), 1)
    submit(state, "later")
    assert drops.drop_groups(state, ["cut"], "poisoned") == 2
    assert _rows(state) == [
        (0, 0, 0, {"poisoned": 1}, 2),
        (0, 2, 2, {}, 0),
        (0, 8, 0, {"poisoned": 1}, 0),
        (1, 0, 0, {}, 2),
    ]
    assert _submitted(state) == {0: 6, 1: 2}


def test_what_is_restarted_counts_under_the_version_of_its_new_beginning() -> None:
    state = open_state(policy=broker_pb2.RunPolicy(stale=broker_pb2.STALE_POLICY_DROP))
    submit(state, "slow")
    assert put(state, lease(state, 2)[0], [1, 2, 3]) == []
    make_ready(state, "quick")
    acknowledge(state, deliver(state), 1)
    assert _rows(state) == [
        (0, 0, 0, {"stale": 1}, 0),
        (0, 2, 2, {}, 0),
        (0, 4, 0, {"stale": 1}, 0),
        (1, 0, 0, {}, 2),
    ]
    assert _submitted(state) == {0: 4, 1: 2}


def test_a_rewind_takes_trained_samples_out_again() -> None:
    state = open_state(groups_per_step=1)
    make_ready(state, "a")
    acknowledge(state, deliver(state), 1)
    assert _rows(state) == [(0, 2, 2, {}, 0)]
    reopen_run(state, broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(groups_per_step=1), takes_over=True), 9.0)
    assert _rows(state) == [(0, 2, 0, {}, 2)]


def test_steps_that_the_broker_lost_are_in_the_rows_too() -> None:
    state = open_state()
    step = broker_pb2.StepRecord(policy_version=1, group_ids=["lost"])
    request = broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(), policy_version=1, steps=[step])
    reopen_run(state, request, 9.0)
    assert _rows(state) == [(0, 0, 2, {}, 0)]


def test_versions_long_past_become_one_row_a_bucket() -> None:
    state = open_state(groups_per_step=1)
    submit(state, "early")
    num_steps = counters.NUM_VERSIONS + counters.FOLD_EVERY
    for version in range(num_steps):
        make_ready_alone(state, f"g{version}", version)
    assert state.run.books_version == num_steps - counters.NUM_VERSIONS
    rows = _rows(state)
    assert rows[0] == (16, 0, 0, {}, 2), "what waits since then is in the folded row"
    assert rows[1] == (16, 2, 2 * 17, {}, 0)
    assert [row[0] for row in rows[2:]] == list(range(17, num_steps))
    assert _submitted(state)[16] == 2 * 17 + 2
    assert drops.drop_groups(state, ["early"], "poisoned") == 2
    assert _rows(state)[0] == (16, 0, 0, {"poisoned": 2}, 0)


def make_ready_alone(state: RunState, group_id: str, version: int) -> None:
    """Train one group while the early one goes on waiting."""
    submit(state, group_id)
    with state.edit("early") as early:
        early.prompt_min_version = 10_000
    make_ready(state, group_id, version=version)
    acknowledge(state, deliver(state), version + 1)


@pytest.mark.parametrize("name", ["0|0|submitted", "0|2|trained", "0|0|dropped:poisoned"])
@pytest.mark.parametrize("error", [-1, 1])
def test_a_counter_that_is_wrong_shows(name: str, error: int) -> None:
    state = open_state()
    make_ready(state, "a")
    submit(state, "b")
    acknowledge(state, deliver(state), 1)
    drops.drop_groups(state, ["b"], "poisoned")
    counts = _counts(state)
    assert audit_rows(state, counts).balanced
    assert not audit_rows(state, counts | {name: counts[name] + error}).balanced


def test_a_sample_counted_under_the_wrong_version_shows() -> None:
    state = open_state(groups_per_step=1)
    make_ready(state, "a")
    acknowledge(state, deliver(state), 1)
    submit(state, "b")
    with state.edit("b") as group:
        group.submit_version = 0
    found = audit_rows(state, _counts(state))
    assert found.submitted == found.trained + found.in_flight
    assert not found.balanced


def test_a_run_from_before_there_were_rows_is_audited_by_its_totals() -> None:
    state = open_state()
    state.run.ClearField("books_version")
    make_ready(state, "a")
    acknowledge(state, deliver(state), 1)
    found = audit_rows(state, _counts(state))
    assert (state.pending.counts, list(found.rows), found.trained, found.balanced) == ({}, [], 2, True)


def test_metrics_show_lengths_of_what_was_trained_and_dropped() -> None:
    registry, state = CollectorRegistry(), open_state()
    make_ready(state, "a")
    acknowledge(state, deliver(state), 1)
    submit(state, "b")
    drops.drop_groups(state, ["b"], "poisoned")
    BrokerMetrics(registry).observe_books("run-1", _counts(state))
    dropped = {"run": "run-1", "reason": "poisoned", "max_tokens": "0"}
    assert registry.get_sample_value("penstock_broker_samples_dropped", dropped) == 2
    trained = {"run": "run-1", "max_tokens": "2"}
    assert registry.get_sample_value("penstock_broker_samples_trained_by_length", trained) == 2
