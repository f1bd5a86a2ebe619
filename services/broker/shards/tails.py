"""Seals leases of a token shard, and tells and forgets what it has of samples. Pure operations on a ShardState."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from services.broker.records.store import SampleId
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleTail
from services.broker.shards.acceptance import lease_order
from services.broker.shards.shard_state import ShardState, copied, is_complete, is_unreported


def seal(state: ShardState, requests: Sequence[SealRequest]) -> list[SampleTail]:
    """Accept nothing more under these leases; returns what is stored of each sample, in the name of that lease."""
    return [_seal(state, request) for request in requests]


def _seal(state: ShardState, request: SealRequest) -> SampleTail:
    tail = state.tail(request.sample)
    if tail is None or not _is_past(tail, request):
        tail = _sealed(state, request, tail)
    answer = copied(tail)
    # Named like the question, also where the run asks late, or has lost its last second and counts from before it.
    answer.lease_id, answer.is_sealed = request.lease_id, True
    return answer


def _is_past(tail: SampleTail, request: SealRequest) -> bool:
    """Whether the shard accepts nothing under the lease already: it ended, or another one came after it."""
    if tail.lease_id == request.lease_id:
        return tail.is_sealed
    if tail.attempt == request.attempt and is_complete(tail):
        return True
    return lease_order(tail.attempt, tail.lease_id) > lease_order(request.attempt, request.lease_id)


def _sealed(state: ShardState, request: SealRequest, old: SampleTail | None) -> SampleTail:
    index = request.sample_index
    tails = state.edit(request.sample).tails
    if old is None or old.attempt != request.attempt:
        # No chunk came under the lease, or since the sample was restarted.
        state.clear(request.sample)
        tails[index].CopyFrom(SampleTail(attempt=request.attempt))
    tail = tails[index]
    if tail.lease_id != request.lease_id:
        tail.lease_id, tail.is_reported = request.lease_id, False
        tail.ClearField("generator_id")
        tail.ClearField("finish_reason")
        state.ended.discard(request.sample)
    tail.is_sealed = True
    return tail


def unreported(state: ShardState, samples: Collection[SampleId]) -> list[TailReport]:
    """The ends among those of these samples that the run has not confirmed."""
    return _reports(state, state.ended.intersection(samples))


def progress(state: ShardState, samples: Iterable[SampleId], *, shard: int) -> list[TailReport]:
    """What these samples have, without those that ended; for a call with reports of other shards, too."""
    return [report for report in _reports(state, samples, shard) if not report.tail.is_sealed]


def _reports(state: ShardState, samples: Iterable[SampleId], shard: int = 0) -> list[TailReport]:
    reports: list[TailReport] = []
    for group_id, index in samples:
        tail = state.tail((group_id, index))
        if tail is not None:
            reports.append(TailReport(group_id=group_id, sample_index=index, tail=copied(tail), token_shard=shard))
    return reports


def confirm(state: ShardState, reports: Sequence[TailReport]) -> None:
    """Note that the run knows of these ends."""
    changed: set[str] = set()
    for report in reports:
        tail = state.tail(report.sample)
        if tail is not None and tail.lease_id == report.tail.lease_id and is_unreported(tail):
            state.edit(report.sample).tails[report.sample_index].is_reported = True
            state.ended.discard(report.sample)
            changed.add(report.group_id)
    for group_id in changed:
        state.rest(group_id)


def forget(state: ShardState, group_ids: Iterable[str]) -> int:
    """Delete groups that the run needs no more; returns their number."""
    known = [group_id for group_id in group_ids if state.knows(group_id)]
    for group_id in known:
        state.remove(group_id)
    return len(known)
