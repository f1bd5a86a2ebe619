"""Takes into the run what its token shards say of samples under way. Pure operations on a RunState.

A token shard stores the chunks of its samples by itself. Four things reach the run: progress, now and then; the end of
a sample; its return by the generator; and, once its lease has ended otherwise, how many tokens are stored: it is then
sealed.

Promise: only what a shard says of the sample's current lease counts, once; anything else was said of a lease that the
run has dropped, restarted or counted already, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import drops, leasing, scores
from services.broker.records.token_tails import TailReport
from services.broker.records_pb2 import GroupRecord, SampleRecord, SampleTail
from services.broker.state.run_state import RunState

_LEASED, _SEALING = broker_pb2.SAMPLE_STATE_LEASED, broker_pb2.SAMPLE_STATE_SEALING
_ENDS = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))


def take_reports(state: RunState, shard: int, reports: Sequence[TailReport], now_s: float) -> None:
    """Take what a shard says of samples, or several shards do; repeated reports change nothing."""
    by_group: dict[str, list[TailReport]] = {}
    for report in reports:
        by_group.setdefault(report.group_id, []).append(report)
    for group_id, members in by_group.items():
        group = state.groups.get(group_id)
        if group is None or not group.token_shard:
            continue
        own = [report for report in members if group.token_shard == (report.token_shard or shard)]
        current = [report for report in own if _is_current(group, report)]
        if any(_ends_lease(group, report) for report in current):
            with state.edit(group_id):
                for report in current:
                    _take(state, group, report, now_s)
                drops.close_group(state, group)
        elif current:
            state.grow(group_id)
            for report in current:
                _take_tokens(state, group, report)


def _is_current(group: GroupRecord, report: TailReport) -> bool:
    """Whether it is said of the sample's current lease, and news."""
    if report.sample_index >= len(group.samples):
        return False
    sample, tail = group.samples[report.sample_index], report.tail
    if sample.lease_id != tail.lease_id:
        return False
    if sample.state == _SEALING:
        return tail.is_sealed or bool(tail.finish_reason)
    # The run did not ask to seal a lease that goes on.
    is_end = bool(tail.finish_reason)
    return sample.state == _LEASED and (is_end or (not tail.is_sealed and tail.num_tokens > sample.num_tokens))


def _ends_lease(group: GroupRecord, report: TailReport) -> bool:
    return group.samples[report.sample_index].state == _SEALING or bool(report.tail.finish_reason)


def _take(state: RunState, group: GroupRecord, report: TailReport, now_s: float) -> None:
    """Take one report inside an `edit` of its group."""
    sample, tail = group.samples[report.sample_index], report.tail
    # Of two reports in one request the first may have ended the lease.
    if sample.state not in (_LEASED, _SEALING):
        return
    _take_tokens(state, group, report)
    if tail.finish_reason in _ENDS:
        sample.state = broker_pb2.SAMPLE_STATE_FINISHED
        sample.finish_reason, sample.finish_s = tail.finish_reason, now_s
        if tail.HasField("score"):
            scores.store_score(state, group, report.sample_index, tail.score, now_s)
    elif sample.state == _SEALING or tail.finish_reason:
        leasing.requeue(state, group, report.sample_index)


def _take_tokens(state: RunState, group: GroupRecord, report: TailReport) -> None:
    """Count the tokens that are stored, which may be fewer than were counted if the store lost its last second."""
    sample, tail = group.samples[report.sample_index], report.tail
    state.index.grow(group.group_id, tail.stored_bytes - sample.stored_bytes)
    sample.num_tokens, sample.stored_bytes = tail.num_tokens, tail.stored_bytes
    sample.last_chunk_s = max(sample.last_chunk_s, tail.last_chunk_s)
    _take_versions(state, group.group_id, sample, tail)


def _take_versions(state: RunState, group_id: str, sample: SampleRecord, tail: SampleTail) -> None:
    for name in ("min_version", "max_version"):
        if tail.HasField(name):
            setattr(sample, name, getattr(tail, name))
        else:
            sample.ClearField(name)
    if tail.HasField("min_version"):
        state.lower_version(group_id, tail.min_version)
