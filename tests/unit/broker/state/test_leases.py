from __future__ import annotations

from copy import deepcopy

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from services.broker.ingest.token_chunk import read_chunk, read_chunks
from services.broker.operations import append_tokens, leasing
from services.broker.operations.leasing import GeneratorFacts
from services.broker.state.run_audit import audit
from tests.helpers.brokers.broker import chunk, duration
from tests.unit.broker.builders import (
    acknowledge,
    as_lease,
    deliver,
    facts,
    finish,
    lease,
    make_ready,
    open_state,
    put,
    renew,
    submit,
    suffix,
)

ABORTED, STOP = types_pb2.FINISH_REASON_ABORTED, types_pb2.FINISH_REASON_STOP


def _reason(facts_of_generator: GeneratorFacts, state: leasing.RunState) -> str:
    return leasing.lease(state, facts_of_generator, max_leases=9, now_s=2.0, make_suffix=suffix).reason


def test_no_more_groups_start_than_the_staleness_bound_allows() -> None:
    state = open_state(groups_per_step=2, max_staleness=1)
    submit(state, *(f"g{number}" for number in range(9)))
    assert {grant.sample[0] for grant in lease(state, 100)} == {"g0", "g1", "g2", "g3"}
    assert "admission" in _reason(facts(), state)


def test_a_generator_that_lags_may_start_less_than_one_that_is_current() -> None:
    state = open_state(groups_per_step=2, max_staleness=1)
    make_ready(state, "a", "b", "c", "d")
    acknowledge(state, deliver(state), 1)
    submit(state, "e", "f", "g")
    assert lease(state, 100, 0) == []
    assert {grant.sample[0] for grant in lease(state, 100, 1)} == {"e", "f"}


def test_a_generator_too_far_behind_gets_nothing() -> None:
    state = open_state(version=5, max_staleness=1)
    submit(state, "a")
    assert "behind" in _reason(facts(3), state)
    assert lease(state, 100, 3) == []


def test_a_generator_ahead_of_a_rewound_run_gets_nothing() -> None:
    state = open_state(version=5)
    submit(state, "a")
    assert "ahead" in _reason(facts(6), state)


def test_an_evaluation_goes_first_and_needs_no_admission() -> None:
    state = open_state(groups_per_step=1)
    submit(state, "a", "b")
    assert len(lease(state, 2)) == 2
    submit(state, "e", purpose=types_pb2.PURPOSE_EVALUATE, group_size=1)
    assert [grant.sample for grant in lease(state, 9)] == [("e", 0)]


def test_an_evaluation_waits_for_the_version_it_asks_for() -> None:
    state = open_state(version=3)
    submit(state, "e", purpose=types_pb2.PURPOSE_EVALUATE, group_size=1, min_policy_version=3)
    assert lease(state, 9, 2) == []
    assert len(lease(state, 9, 3)) == 1


def test_a_prompt_too_long_for_one_generator_is_left_to_another() -> None:
    state = open_state()
    submit(state, "a", token_ids=int32_bytes([1] * 50))
    assert lease(state, 9, context=50, longest=128) == []
    assert len(lease(state, 9, context=51, longest=128)) == 2


def test_a_prompt_too_long_for_every_generator_is_dropped_with_its_reason() -> None:
    state = open_state()
    submit(state, "a", "b", token_ids=int32_bytes([1] * 50))
    assert lease(state, 9, context=50, longest=None) == []
    assert audit(state).dropped == {}
    assert lease(state, 9, context=50, longest=50) == []
    assert audit(state).dropped == {"context_too_long": 4}


def test_expired_lease_is_redelivered_once_with_its_prefix() -> None:
    state = open_state()
    submit(state, "a", "b")
    first = lease(state, 1)[0]
    assert put(state, first, [5, 6, 7]) == []
    assert leasing.expire(state, 31.9) == 0
    assert leasing.expire(state, 32.0) == 1
    assert leasing.expire(state, 32.0) == 0
    again = lease(state, 1, generator_id="gen-2")[0]
    assert (again.sample, again.num_prefix_tokens) == (first.sample, 3)
    assert again.lease_id != first.lease_id


def test_a_renewed_lease_lives_on() -> None:
    state = open_state()
    submit(state, "a")
    grants = lease(state, 2)
    renew(state, [grants[0].lease_id], 20.0)
    assert leasing.expire(state, 40.0) == 1
    assert state.groups["a"].samples[0].state == broker_pb2.SAMPLE_STATE_LEASED
    assert state.groups["a"].samples[1].state == broker_pb2.SAMPLE_STATE_QUEUED


def test_a_lease_that_is_renewed_but_brings_no_token_ends() -> None:
    state = open_state()
    submit(state, "a")
    hanging, going_on = lease(state, 2)
    num_expired = 0
    for offset, now_s in enumerate(range(10, 710, 10)):
        put(state, going_on, [5], offset=offset, now_s=float(now_s))
        renew(state, [hanging.lease_id, going_on.lease_id], float(now_s))
        num_expired += leasing.expire(state, float(now_s))
        assert num_expired == 0 or now_s > 600
    assert num_expired == 1
    assert state.groups["a"].samples[0].state == broker_pb2.SAMPLE_STATE_QUEUED
    assert state.groups["a"].samples[1].state == broker_pb2.SAMPLE_STATE_LEASED


def test_a_lease_of_long_completions_on_a_slow_generator_lives_on_without_a_token() -> None:
    """20 lives of 15 s are 300 s: a sample may wait longer than that for a drain, or behind another one."""
    state = open_state(max_completion_tokens=32_768)
    submit(state, "a")
    grants = lease(state, 2)
    ids = [grant.lease_id for grant in grants]
    for now_s in range(10, 4920, 10):
        assert renew(state, ids, float(now_s), speed=20.0) == [], now_s
    assert leasing.expire(state, 4915.0) == 0
    assert renew(state, ids, 4930.0, speed=20.0) == ids
    assert str(state.limits.token_silence("gen-1", 20.0)) == (
        "4915 s (3 x 32768 tokens at 20 tokens/s of gen-1; limits.token_silence (trainer.max_lease_silence_s) sets "
        "another)"
    )


def test_how_long_a_lease_lives_without_a_token_can_be_set() -> None:
    state = open_state(token_silence=duration(45))
    submit(state, "a")
    [grant] = lease(state, 1)
    assert renew(state, [grant.lease_id], 40.0, speed=1.0) == []
    assert renew(state, [grant.lease_id], 56.0, speed=1.0) == [grant.lease_id]
    with pytest.raises(InvalidFieldError, match=r"limits.token_silence: 700000"):
        open_state(token_silence=duration(700_000))


def test_only_the_holder_renews_a_lease() -> None:
    state = open_state()
    submit(state, "a")
    grants = lease(state, 1)
    renew(state, [grants[0].lease_id], 20.0, holder="gen-2")
    assert leasing.expire(state, 40.0) == 1


def test_a_sample_that_loses_too_many_leases_is_dropped_and_its_group_with_it() -> None:
    state = open_state(max_leases_per_sample=2)
    submit(state, "a")
    for now_s in (0.0, 100.0):
        lease(state, 1, now_s=now_s)
        leasing.expire(state, now_s + 50)
    assert audit(state).dropped == {"too_many_leases": 1, "group_too_small": 1}
    assert audit(state).balanced
    assert "a" not in state.groups


def test_a_repeated_chunk_is_accepted_without_effect() -> None:
    state = open_state()
    submit(state, "a")
    grant = lease(state, 1)[0]
    assert put(state, grant, [5, 6]) == []
    state.settle()
    assert put(state, grant, [5, 6]) == []
    assert not state.is_changed
    assert put(state, grant, [], offset=2, finish=STOP) == []
    state.settle()
    assert put(state, grant, [], offset=2, finish=STOP) == []
    assert put(state, grant, [5, 6]) == []
    assert not state.is_changed


def test_a_chunk_with_a_gap_is_answered_with_where_to_resume() -> None:
    state = open_state()
    submit(state, "a")
    grant = lease(state, 1)[0]
    assert put(state, grant, [5, 6]) == []
    for offset in (1, 3):
        [error] = put(state, grant, [7, 8], offset=offset)
        assert (error.reason, error.next_offset) == ("OFFSET_MISMATCH", 2)
    assert state.groups["a"].samples[grant.sample[1]].num_tokens == 2


def test_a_chunk_under_a_lost_lease_is_refused() -> None:
    state = open_state()
    submit(state, "a")
    old = lease(state, 1)[0]
    leasing.expire(state, 100.0)
    new = lease(state, 1, generator_id="gen-2")[0]
    assert new.sample == old.sample
    assert [error.reason for error in put(state, old, [5])] == ["LEASE_LOST"]
    assert [error.reason for error in put(state, new, [5], holder="gen-1")] == ["LEASE_LOST"]
    assert put(state, new, [5], holder="gen-2") == []


def test_a_chunk_of_an_unknown_sample_is_refused() -> None:
    state = open_state()
    submit(state, "a")
    grant = lease(state, 1)[0]
    state.retire("a")
    assert [error.reason for error in put(state, grant, [5])] == ["UNKNOWN_SAMPLE"]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": float32_bytes([-0.5, float("nan")])},
        {"logprobs": float32_bytes([-0.5, float("-inf")])},
        {"logprobs": float32_bytes([-0.5, 0.1])},
        {"logprobs": float32_bytes([-0.5])},
        {"token_ids": b"12345"},
        {"token_ids": int32_bytes([1, -1])},
        {"policy_versions": encode_versions([0])},
        {"policy_versions": encode_versions([0, 1])},
        {"loss_mask": b"\1\2"},
        {"loss_mask": b"\1"},
        {"text": "not at the end"},
        {"finish_reason": 9},
        {"token_ids": b"", "logprobs": b"", "policy_versions": encode_versions([])},
        {
            "token_ids": int32_bytes([1] * 65),
            "logprobs": float32_bytes([0.0] * 65),
            "policy_versions": encode_versions([0] * 65),
        },
    ],
)
def test_a_malformed_chunk_is_refused_and_nothing_is_stored(changes: dict[str, object]) -> None:
    state = open_state()
    submit(state, "a")
    grant = lease(state, 1)[0]
    state.settle()
    assert [error.reason for error in put(state, grant, [5, 6], **changes)] == ["INVALID_FIELD"]
    assert state.delta().chunks == []
    assert state.groups["a"].samples[grant.sample[1]].num_tokens == 0


def test_versions_across_an_update_are_remembered() -> None:
    state = open_state(version=4, max_staleness=2)
    submit(state, "a")
    grant = lease(state, 1, 3)[0]
    assert put(state, grant, [5, 6], policy_versions=encode_versions([3, 4])) == []
    sample = state.groups["a"].samples[grant.sample[1]]
    assert (sample.min_version, sample.max_version) == (3, 4)


def test_tokens_of_older_weights_than_the_lease_make_their_group_older_at_once() -> None:
    state = open_state(version=3, max_staleness=3)
    submit(state, "a", group_size=2)
    first, second = lease(state, 2, 3)
    assert put(state, first, [1, 2], version=3) == []
    assert state.index.versions == {"a": 3}
    assert put(state, second, [1, 2], version=1) == []
    assert put(state, first, [3], offset=2, version=2) == []
    assert state.index.versions == {"a": 1}
    with state.edit("a"):
        pass  # Afterwards it is what the whole record says.
    assert state.index.versions == {"a": 1}


def test_a_chunk_that_comes_twice_in_a_request_is_stored_once() -> None:
    state = open_state()
    submit(state, "a")
    (grant,) = lease(state, 1)
    once, more = chunk(as_lease(grant), [1, 2]), chunk(as_lease(grant), [3], offset=2)
    chunks = read_chunks([deepcopy(once), deepcopy(once), more])
    accepted = append_tokens.accept_chunks(state, "gen-1", chunks, 3.0)
    assert accepted.errors == []
    assert [facts_of_chunk.offset for facts_of_chunk in accepted.repeated] == [0]
    assert state.groups["a"].samples[0].num_tokens == 3
    assert [data for _sample, data in state.pending.chunks] == [chunks[0].payload, chunks[2].payload]


def test_an_aborted_sample_returns_to_the_queue_with_its_tokens() -> None:
    state = open_state()
    submit(state, "a")
    grant = lease(state, 1)[0]
    assert put(state, grant, [5, 6], finish=ABORTED) == []
    [again] = [item for item in lease(state, 9, generator_id="gen-2") if item.sample == grant.sample]
    assert again.num_prefix_tokens == 2


def test_a_rollback_restores_records_queues_and_counters() -> None:
    state = open_state()
    submit(state, "a", "b")
    state.settle()
    before = (len(state.queue), dict(state.generation_leases), state.run.submitted)
    finish(state, lease(state, 3)[:1])
    submit(state, "c")
    state.rollback()
    assert (len(state.queue), dict(state.generation_leases), state.run.submitted) == before
    assert not state.is_changed
    assert len(lease(state, 9)) == 4


def test_chunks_read_together_are_what_they_are_alone() -> None:
    lease_of = broker_pb2.Lease(lease_id="1.0.0_1.x", key=types_pb2.SampleKey(group_id="g"))
    good = [chunk(lease_of, [4, 5], version=3), chunk(lease_of, [6], offset=2, version=4)]
    last = chunk(lease_of, [7], offset=3, version=4, finish=STOP)
    bad = [
        chunk(lease_of, [8, -1]),
        chunk(lease_of, [8], logprobs=float32_bytes([float("nan")])),
        chunk(lease_of, [8], logprobs=float32_bytes([0.5])),
        chunk(lease_of, [8], logprobs=b""),
        chunk(lease_of, [8], token_ids=b"123"),
        chunk(lease_of, []),
        chunk(lease_of, [8], policy_versions=encode_versions([1, 1])),
        chunk(lease_of, [8], policy_versions=encode_versions([-1])),
    ]
    for spoilt in ([], *([one] for one in bad)):
        request = [*good, *spoilt, last]
        alone = [read_chunk(deepcopy(one)) for one in request]
        assert read_chunks([deepcopy(one) for one in request]) == alone
        assert [bool(facts_of.fault) for facts_of in alone] == [False, False, *(True for _ in spoilt), False]
    assert [(facts_of.min_version, facts_of.num_tokens) for facts_of in alone[:2]] == [(3, 2), (4, 1)]


@pytest.mark.parametrize("num_commits", [0, 1, 2])
def test_growth_is_undone_to_the_last_operation_and_to_the_last_commit(num_commits: int) -> None:
    state = open_state()
    submit(state, "a")
    grants = lease(state, 2)
    state.settle()
    for number in range(num_commits):
        assert put(state, grants[0], [5], offset=number, now_s=3.0 + number) == []
        state.settle()
    committed = state.groups.serialized("a"), state.index.live_bytes
    assert put(state, grants[0], [5], offset=num_commits, now_s=9.0) == []
    state.keep()
    kept = state.groups.serialized("a"), state.index.live_bytes
    assert put(state, grants[1], [6], version=0, now_s=9.5) == []
    state.undo()
    assert (state.groups.serialized("a"), state.index.live_bytes) == kept
    state.rollback()
    assert (state.groups.serialized("a"), state.index.live_bytes) == committed
