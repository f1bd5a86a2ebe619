"""What a run has in the store is counted by its records, and bounded by its policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2
from services.broker.ingest.trajectory_decoder import read_put
from services.broker.operations import append_trajectories, compaction, delivery, drops
from services.broker.operations.append_trajectories import Put, PutOutcome
from services.broker.operations.lifecycle import reopen_run
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.state.batches import SAMPLE_BYTES
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.helpers.brokers.trajectories import group, pack_groups
from tests.unit.broker.builders import (
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    loaded,
    make_ready,
    open_state,
    score,
    submit,
)


def limited(state: RunState, max_retained_bytes: int) -> None:
    """A bound of this many bytes, which no run can be opened with."""
    state.policy = replace(state.policy, max_retained_bytes=max_retained_bytes)


def check(state: RunState) -> tuple[int, int]:
    """Live and trained bytes; they are what the records say, in a copy that never saw how they came about."""
    records: dict[str, bytes | None] = {name: state.groups.serialized(name) for name in state.groups}
    again = loaded(state.run.SerializeToString(), records)
    found = (state.index.live_bytes, state.index.retained_bytes)
    assert found == (again.index.live_bytes, again.index.retained_bytes)
    return state.index.live_bytes, state.index.retained_bytes.total()


def compact(state: RunState, name: str, num_bytes: int) -> None:
    samples = [
        compaction.CompactSample(sample=(name, index), attempt=0, payload=bytes(num_bytes)) for index in range(2)
    ]
    assert compaction.replace_chunks(state, samples) == 2


def test_bytes_are_counted_from_the_prompt_to_the_step_and_back() -> None:
    state = open_state(groups_per_step=1)
    assert check(state) == (0, 0)
    submit(state, "a")
    with_prompt, _ = check(state)
    assert with_prompt == state.groups["a"].prompt_bytes + 2 * SAMPLE_BYTES > 2 * SAMPLE_BYTES
    finish(state, lease(state, 2))
    state.settle()
    with_tokens, _ = check(state)
    stored = sum(sample.stored_bytes for sample in state.groups["a"].samples)
    assert with_tokens == with_prompt + stored > with_prompt
    for scored in lease_scoring(state, 2):
        score(state, scored)
    acknowledge(state, deliver(state), 1)
    assert check(state) == (0, with_tokens)
    state.settle()
    compact(state, "a", 10)
    assert check(state) == (0, with_prompt + 2 * 10)
    state.settle()
    assert check(state) == (0, with_prompt + 2 * 10)
    request = broker_pb2.OpenRunRequest(run_id="run-1", limits=state.limits.to_proto(), takes_over=True)
    reopen_run(state, request, 9.0)
    assert check(state) == (with_prompt + 2 * 10, 0)
    drops.drop(state, "a", "x")
    assert check(state) == (0, 0)


def test_a_sample_that_is_dropped_or_restarted_leaves_its_bytes() -> None:
    state = open_state(groups_per_step=1)
    submit(state, "a")
    with_prompt, _ = check(state)
    finish(state, lease(state, 2))
    with_tokens, _ = check(state)
    with state.edit("a") as record:
        drops.lose_sample(state, record, 0, "x")
    half = (with_tokens - with_prompt) // 2
    assert check(state)[0] == with_tokens - half
    with state.edit("a") as record:
        drops.reset_sample(state, record, 1)
    assert check(state)[0] == with_prompt


def test_what_is_undone_or_not_stored_is_not_counted() -> None:
    state = open_state(groups_per_step=1)
    submit(state, "a")
    state.settle()
    before = check(state)
    finish(state, lease(state, 2))
    state.undo()
    assert check(state) == before
    finish(state, lease(state, 2))
    state.keep()
    state.rollback()
    assert check(state) == before


def test_the_oldest_steps_go_beyond_half_of_the_bytes_and_the_newest_stays() -> None:
    state = open_state(groups_per_step=1)
    for version in range(4):
        make_ready(state, f"g{version}", version=version)
        acknowledge(state, deliver(state), version + 1)
    assert sorted(state.index.trained) == [1, 2, 3, 4]
    each = max(state.index.retained_bytes.values())
    limited(state, 2 * 2 * each)
    make_ready(state, "g4", version=4)
    acknowledge(state, deliver(state), 5)
    assert sorted(state.index.trained) == [4, 5]
    assert sum(check(state)) <= 2 * each
    limited(state, 2)
    make_ready(state, "g5", version=5)
    acknowledge(state, deliver(state), 6)
    assert sorted(state.index.trained) == [6]
    assert audit(state).balanced


def test_the_oldest_steps_go_beyond_the_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_RETAINED_GROUPS", 3)
    state = open_state(groups_per_step=2)
    for version in range(3):
        make_ready(state, f"g{version}", version=version)
        make_ready(state, f"h{version}", version=version)
        acknowledge(state, deliver(state), version + 1)
    assert sorted(state.index.trained) == [3]
    assert audit(state).balanced


def test_a_full_run_starts_no_group_beyond_a_step_and_says_why() -> None:
    state = open_state(groups_per_step=1, max_staleness=3)
    submit(state, "a", "b", "c")
    grants = lease(state, 1)
    limited(state, 2)
    # A group that is started goes on; the step that is being filled gets its groups.
    rest = lease(state, 8)
    assert [grant.sample for grant in rest] == [("a", 1)]
    verdict = state.admission().judge(generator_version=0)
    assert verdict.reason == (
        "policy.max_retained_bytes: half of its 2 bytes wait or are under way, and 1 groups are out, enough for a "
        "step; the trainer must finish one"
    )
    finish(state, [*grants, *rest])
    for scored in lease_scoring(state, 2):
        score(state, scored)
    assert lease(state, 8) == []
    acknowledge(state, deliver(state), 1)
    assert {grant.sample[0] for grant in lease(state, 8, version=1)} == {"b"}
    check(state)


def test_a_prompt_too_many_is_refused_by_the_bound_and_a_steps_prompts_never() -> None:
    state = open_state(groups_per_step=2)
    limited(state, 2)
    # An id that waits already is no further prompt.
    [error] = submit(state, "a", "b", "c", "a")
    assert (error.reason, error.message) == (
        "QUEUE_FULL",
        "policy.max_retained_bytes: samples that wait or are under way take half of its 2 bytes; send it again later",
    )
    lease(state, 6)
    assert submit(state, "e", "f") == []


def put(state: RunState, name: str) -> PutOutcome:
    packed = pack_groups([group(name)])
    return append_trajectories.put(state, Put(payload_id=name, payload=packed, groups=read_put(packed)), 1.0)


def test_a_put_waits_until_the_trainer_has_made_room() -> None:
    state = open_state(groups_per_step=1, max_staleness=3)
    assert put(state, "a").num_samples == 2
    limited(state, 2 * state.index.live_bytes)
    assert put(state, "b").is_full
    names = deliver(state)
    # Delivered, it is still in the store.
    assert put(state, "b").is_full
    acknowledge(state, names, 1)
    assert put(state, "b").num_samples == 2
    check(state)


def test_a_bound_too_small_for_any_run_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"policy\.max_retained_bytes: 5; must be 1048576 to"):
        open_state(policy=broker_pb2.RunPolicy(max_retained_bytes=5))


def test_the_metrics_say_what_a_run_has_in_the_store() -> None:
    state, registry = open_state(groups_per_step=1), CollectorRegistry()
    make_ready(state, "a")
    acknowledge(state, deliver(state), 1)
    submit(state, "b")
    BrokerMetrics(registry).observe(state, num_conflicts=0)
    found = [
        registry.get_sample_value("penstock_broker_stored_bytes", {"run": "run-1", "kind": kind})
        for kind in ("live", "trained")
    ]
    assert found == list(check(state))
    assert all(found)
