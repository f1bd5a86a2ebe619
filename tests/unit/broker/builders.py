"""A run state to try operations on, without any store."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.v1 import broker_pb2, types_pb2
from services.broker.ingest.token_chunk import read_chunk
from services.broker.operations import append_tokens, delivery, leasing, renewal, scores, submission
from services.broker.operations.delivery import Consumer
from services.broker.operations.leasing import GeneratorFacts, Grant
from services.broker.operations.lifecycle import create_run
from services.broker.operations.renewal import Heard
from services.broker.operations.scores import ScoringGrant
from services.broker.records.run_clock import Reading
from services.broker.records.store import Mark, Snapshot
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import chunk, limits, prompt

CONSUMER = Consumer(consumer_id="rank-0", purpose=types_pb2.PURPOSE_TRAIN, stream_id="s", number=1)
_numbers = itertools.count()


def open_state(*, version: int = 0, policy: broker_pb2.RunPolicy | None = None, **changes: Any) -> RunState:
    """A new run with a trainer attached."""
    state = RunState()
    request = broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(**changes), policy_version=version, policy=policy)
    create_run(state, request, 0.0)
    delivery.attach(state, CONSUMER, held=())
    state.settle()
    return state


def loaded(run: bytes, records: Mapping[str, bytes | None]) -> RunState:
    """A copy of a run from the store."""
    state, clock = RunState(), Reading(now_s=0.0, unbroken_since_s=0.0)
    for _ in state.take_over(Snapshot(mark=Mark(1, "m"), is_full=True, run=run, groups=records, clock=clock)):
        pass
    return state


def submit(state: RunState, *group_ids: str, **changes: Any) -> list[types_pb2.ItemError]:
    """Submit prompts of the run's group size."""
    changes = {"group_size": state.limits.group_size} | changes
    return submission.submit(state, [prompt(name, **changes) for name in group_ids], retired=(), now_s=1.0)


def facts(
    version: int = 0,
    *,
    generator_id: str = "gen-1",
    context: int = 128,
    longest: int | None = 128,
    instance_id: str = "",
) -> GeneratorFacts:
    """A generator."""
    return GeneratorFacts(
        generator_id=generator_id,
        policy_version=version,
        max_context_tokens=context,
        longest_context_tokens=longest,
        instance_id=instance_id,
    )


def suffix() -> str:
    """A lease id's ending."""
    return f"{next(_numbers):06x}"


def lease(state: RunState, count: int, version: int = 0, *, now_s: float = 2.0, **changes: Any) -> list[Grant]:
    """Lease samples to a generator."""
    found = leasing.lease(state, facts(version, **changes), max_leases=count, now_s=now_s, make_suffix=suffix)
    return found.grants


def renew(
    state: RunState, lease_ids: Iterable[str], now_s: float, *, holder: str = "gen-1", speed: float | None = None
) -> list[str]:
    """A generator's heartbeat; returns the leases that are left to expire, sorted."""
    heard = Heard(holder_id=holder, lease_ids=frozenset(lease_ids), heard_s=now_s, tokens_per_second=speed)
    return sorted(renewal.renew(state, heard, now_s))


def as_lease(grant: Grant) -> broker_pb2.Lease:
    """The grant as the generator sees it."""
    key = types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1])
    return broker_pb2.Lease(lease_id=grant.lease_id, key=key)


def put(
    state: RunState, grant: Grant, tokens: list[int], *, holder: str = "gen-1", now_s: float = 3.0, **changes: Any
) -> list[broker_pb2.ChunkError]:
    """Send one chunk."""
    facts_of_chunk = read_chunk(chunk(as_lease(grant), tokens, **changes))
    return append_tokens.accept_chunks(state, holder, [facts_of_chunk], now_s).errors


def finish(state: RunState, grants: list[Grant], version: int = 0, *, holder: str = "gen-1") -> None:
    """Complete samples with two tokens each."""
    for grant in grants:
        tokens = [5, 6]
        offset = grant.num_prefix_tokens
        stop = types_pb2.FINISH_REASON_STOP
        assert put(state, grant, tokens, holder=holder, version=version, offset=offset, finish=stop) == []


def lease_scoring(state: RunState, count: int, *, now_s: float = 4.0) -> list[ScoringGrant]:
    """Lease finished samples to a reward worker."""
    return scores.lease_scoring(state, "worker-1", max_leases=count, now_s=now_s, make_suffix=suffix)


def score(
    state: RunState, grant: ScoringGrant, status: types_pb2.ScoreStatus.ValueType = types_pb2.SCORE_STATUS_OK
) -> scores.Receipts:
    """Report a score."""
    value = 1.0 if status == types_pb2.SCORE_STATUS_OK else None
    result = broker_pb2.ScoreResult(
        lease_id=grant.lease_id,
        key=types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1]),
        score=types_pb2.Score(status=status, value=value),
    )
    return scores.accept_results(state, "worker-1", [result], 5.0)


def make_ready(state: RunState, *group_ids: str, version: int = 0) -> None:
    """Submit, decode and score groups."""
    submit(state, *group_ids)
    grants = lease(state, 100, version)
    assert {grant.sample[0] for grant in grants} == set(group_ids)
    finish(state, grants, version)
    for grant in lease_scoring(state, 100):
        score(state, grant)


def deliver(state: RunState, count: int = 100) -> list[str]:
    """Hand groups to the trainer."""
    return delivery.deliver(state, CONSUMER, max_groups=count, target_tokens=0)


def acknowledge(state: RunState, group_ids: list[str], version: int) -> broker_pb2.AckStepResponse:
    """Acknowledge a step."""
    return delivery.acknowledge(state, "rank-0", group_ids, version, 6.0)
