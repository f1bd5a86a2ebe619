"""Leases samples to reward workers and scorers, and stores what they computed. Pure operations on a RunState.

A finished sample waits for its reward; a training sample of a run that asks for log-probs of a reference then waits for
those, finished once more, by the same leases.

Promise: an error never becomes a zero. A sample is SCORED only by a finite value with status OK, and finite log-probs
of all its tokens if the run asks for them; everything else drops it with its own reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.errors import require
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import float32_array
from services.broker.ingest.score_check import DROP_REASONS, check_score
from services.broker.operations import drops
from services.broker.records.store import SampleId
from services.broker.records.stored_sample import reference_element
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state.queue_entry import REFERENCE, REWARD, ScoringTask, next_task, waiting_for
from services.broker.state.run_state import RunState

_FINISHED, _SCORING = broker_pb2.SAMPLE_STATE_FINISHED, broker_pb2.SAMPLE_STATE_SCORING
_SCORED = broker_pb2.SAMPLE_STATE_SCORED
_LATER_STATES = frozenset((_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED, broker_pb2.SAMPLE_STATE_TRAINED))
REFERENCE_FAILED = "reference_failed"
"""Why a sample is dropped of which a scorer has no log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringGrant:
    """A granted scoring lease."""

    lease_id: str
    sample: SampleId
    attempt: int
    finish_reason: types_pb2.FinishReason.ValueType
    expire_s: float
    life_s: float
    """Its duration from the grant and after each renewal."""
    generator_id: str
    """The generator that finished the sample."""
    token_shard: int
    """Where its tokens are; 0 if they are with the run."""


@dataclass(slots=True, kw_only=True)
class Receipts:
    """The outcome of results, by lease id."""

    accepted: list[str]
    lost: list[str]
    num_repeated: int = 0
    """The accepted results that were stored before."""


def lease_scoring(
    state: RunState,
    worker_id: str,
    *,
    max_leases: int,
    now_s: float,
    make_suffix: Callable[[], str],
    task: ScoringTask = REWARD,
) -> list[ScoringGrant]:
    """Lease up to `max_leases` samples that wait for a task, evaluation first, then in order of submission."""
    chosen: dict[str, list[int]] = {}
    for _task, _purpose, sequence, index in islice(waiting_for(state.finished, task), max_leases):
        group = state.groups.at(sequence)
        if group is not None and not state.run.is_closed:
            chosen.setdefault(group.group_id, []).append(index)
    grants: list[ScoringGrant] = []
    expire_s = now_s + state.limits.scoring_lease_s
    for group_id, indices in chosen.items():
        with state.edit(group_id) as group:
            for index in indices:
                sample = group.samples[index]
                sample.state = _SCORING
                sample.num_scoring_leases += 1
                nth = f"{sample.attempt}_{'r' if task == REFERENCE else 's'}{sample.num_scoring_leases}"
                sample.scoring_lease_id = f"{group.sequence}.{index}.{nth}.{make_suffix()}"
                sample.worker_id, sample.scoring_expire_s = worker_id, expire_s
                grants.append(
                    ScoringGrant(
                        lease_id=sample.scoring_lease_id,
                        sample=(group_id, index),
                        attempt=sample.attempt,
                        finish_reason=sample.finish_reason,
                        expire_s=expire_s,
                        life_s=state.limits.scoring_lease_s,
                        generator_id=sample.generator_id,
                        token_shard=group.token_shard,
                    )
                )
    return grants


def renew_scoring(state: RunState, worker_id: str, lease_ids: Sequence[str], now_s: float) -> None:
    """Renew the leases a worker still works on; a lease with more than half of its duration left is not rewritten."""
    held = state.scoring_leases.get(worker_id, {})
    life_s = state.limits.scoring_lease_s
    for lease_id in lease_ids:
        if lease_id not in held:
            continue
        group_id, index = held[lease_id]
        if state.groups[group_id].samples[index].scoring_expire_s - now_s < life_s / 2:
            with state.edit(group_id) as group:
                group.samples[index].scoring_expire_s = now_s + life_s


def expire_scoring(state: RunState, now_s: float, *, unbroken_since_s: float = 0.0) -> int:
    """Requeue the samples of workers' expired leases; returns how many. Gaps count as in `generation.expire`."""
    if now_s - unbroken_since_s < state.limits.scoring_lease_s:
        return 0

    def end_s(sample: SampleId) -> float:
        return state.groups[sample[0]].samples[sample[1]].scoring_expire_s

    late = state.scoring_ends.ended(state.scoring_leases, end_s, now_s)
    for group_id, indices in late.items():
        with state.edit(group_id) as group:
            for index in indices:
                if group.samples[index].num_scoring_leases >= state.limits.max_leases_per_sample:
                    drops.lose_sample(state, group, index, drops.TOO_MANY_LEASES)
                else:
                    group.samples[index].state = _FINISHED
            drops.close_group(state, group)
    return sum(len(indices) for indices in late.values())


def give_back(state: RunState, worker_id: str, lease_ids: Sequence[str]) -> None:
    """Requeue the samples of leases that a worker does not score; those that are not its own are left as they are."""
    held = state.scoring_leases.get(worker_id, {})
    returned: dict[str, list[int]] = {}
    for lease_id in dict.fromkeys(lease_ids):
        if lease_id in held:
            group_id, index = held[lease_id]
            returned.setdefault(group_id, []).append(index)
    for group_id, indices in returned.items():
        with state.edit(group_id) as group:
            for index in indices:
                group.samples[index].state = _FINISHED


def accept_results(
    state: RunState, worker_id: str, results: Sequence[broker_pb2.ScoreResult], now_s: float
) -> Receipts:
    """Store a worker's results; a repetition has no effect. One is lost if its lease is gone or another worker's.

    Raises:
        InvalidFieldError: A result is not of its lease's task, or has log-probs for another number of tokens.
    """
    receipts = Receipts(accepted=[], lost=[])
    for result in results:
        group, index = state.groups.get(result.key.group_id), result.key.sample_index
        sample = group.samples[index] if group is not None and index < len(group.samples) else None
        if group is None or sample is None or not _is_held(sample, worker_id, result.lease_id):
            receipts.lost.append(result.lease_id)
        elif sample.state == _SCORING:
            with state.edit(group.group_id):
                if next_task(sample) == REFERENCE:
                    _store_reference(state, group, index, result, now_s)
                else:
                    _store(state, group, index, result, now_s)
                drops.close_group(state, group)
            receipts.accepted.append(result.lease_id)
        elif _is_known(sample, result):
            receipts.accepted.append(result.lease_id)
            receipts.num_repeated += 1
        else:
            receipts.lost.append(result.lease_id)
    return receipts


def _is_held(sample: SampleRecord, worker_id: str, lease_id: str) -> bool:
    """Whether this is the sample's latest lease and was granted to this worker."""
    return sample.scoring_lease_id == lease_id and sample.worker_id == worker_id


def _is_known(sample: SampleRecord, result: broker_pb2.ScoreResult) -> bool:
    if sample.state == broker_pb2.SAMPLE_STATE_DROPPED:
        return result.score.status in DROP_REASONS
    is_rewarded = sample.state == _FINISHED and next_task(sample) == REFERENCE
    return sample.state in _LATER_STATES or (is_rewarded and result.score.status == types_pb2.SCORE_STATUS_OK)


def _store(state: RunState, group: GroupRecord, index: int, result: broker_pb2.ScoreResult, now_s: float) -> None:
    score = result.score
    has_logprobs = result.HasField("reference_logprobs")
    require(not has_logprobs, "results.reference_logprobs", "log-probs", f"a score: lease {result.lease_id} is of one")
    store_score(state, group, index, score, now_s)


def store_score(state: RunState, group: GroupRecord, index: int, score: types_pb2.Score, now_s: float) -> None:
    """Store a finished sample's score, inside an `edit` of its group; one that is not OK drops the sample."""
    sample = group.samples[index]
    if score.status != types_pb2.SCORE_STATUS_OK:
        drops.lose_sample(state, group, index, DROP_REASONS[score.status])
        return
    needs_more = state.policy.needs_reference_logprobs and group.purpose == types_pb2.PURPOSE_TRAIN
    sample.state, sample.score_s = _FINISHED if needs_more else _SCORED, now_s
    if needs_more:
        sample.num_scoring_leases = 0
    sample.score.CopyFrom(score)


def _store_reference(
    state: RunState, group: GroupRecord, index: int, result: broker_pb2.ScoreResult, now_s: float
) -> None:
    sample, logprobs = group.samples[index], result.reference_logprobs
    if not result.HasField("reference_logprobs"):
        is_failed = result.score.status in DROP_REASONS
        require(is_failed, "results.score", "a score", f"log-probs: lease {result.lease_id} is of those")
        drops.lose_sample(state, group, index, REFERENCE_FAILED)
        return
    expected = 4 * sample.num_tokens
    require(len(logprobs) == expected, "results.reference_logprobs", f"{len(logprobs)} bytes", f"{expected} bytes")
    element = reference_element(logprobs)
    state.append((group.group_id, index), element)
    state.index.grow(group.group_id, len(element))
    sample.stored_bytes += len(element)
    sample.state, sample.reference_s = _SCORED, now_s


def check_result(result: broker_pb2.ScoreResult) -> None:
    """Raise InvalidFieldError if a result is malformed."""
    score = result.score
    if result.HasField("reference_logprobs"):
        require(not result.HasField("score"), "score", "a score", "unset where log-probs are")
        logprobs = float32_array(result.reference_logprobs, "reference_logprobs")
        require(bool(np.isfinite(logprobs).all()), "reference_logprobs", "NaN or infinity", "finite numbers")
        return
    check_score(score)
