"""Exports trained groups: retained steps, oldest first, and with `follow` each step as it is acknowledged.

Promises: no step is left out silently: one that is no longer retained ends the stream with NotRetainedError, and
samples that Redis lost are counted at the end of their step. Steps trained again after a rewind are sent again;
read-ahead is bounded, so a client that stops reading costs no memory; a follower gets a message at least every
SIGN_OF_LIFE_S.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import structlog

from penstock.errors import NotRetainedError, require
from penstock.network.rpc import MAX_MESSAGE_BYTES
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.pieces import batched
from services.broker.assembly.group_loading import load_records
from services.broker.assembly.large_groups import BYTES_PER_TOKEN, is_large, read_pieces, single_groups, size_bytes
from services.broker.assembly.messages import kept_indices
from services.broker.assembly.microbatch_reader import ENVELOPE_BYTES, too_large
from services.broker.records_pb2 import GroupRecord
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica, row_bytes
from services.broker.state import tallies
from services.broker.state.run_state import RunState
from services.broker.streams.request_reader import wait_for_event

SIGN_OF_LIFE_S = 5.0
MAX_BATCH_RECORDS = 64
MAX_BATCH_TOKENS = 256 * 1024
"""About 2 MiB of payload read ahead; a larger group is read alone."""

_log = structlog.get_logger()
_Response = broker_pb2.ExportTrajectoriesResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A client's position."""

    next_version: int
    """First step that it lacks; 0 means the oldest one retained."""
    history: int | None
    """The run's history counter as the client knows it; None if it has nothing yet."""
    max_groups: int = 0
    """Records wanted of each step; 0 means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next data to send."""

    version: int
    """The step."""
    history: int
    """The run's history counter."""
    names: tuple[str, ...]
    """Its records in order of submission; empty if the step is not done yet."""
    num_lost: int
    """Number of samples of the step that have no record left."""
    max_groups: int
    """Records wanted of the step; 0 means all."""
    is_closed: bool
    """Whether the run is closed."""

    @property
    def is_due(self) -> bool:
        """Whether the step was trained, so that there are groups to send."""
        return bool(self.names or self.num_lost)


def plan(state: RunState, cursor: Cursor) -> Plan:
    """The next step. Raises NotRetainedError if it was trained but is no longer retained."""
    run = state.run
    version = _version_after_rewinds(state, cursor) or min(state.index.trained, default=run.policy_version + 1)
    if run.payload_gone and cursor.next_version <= run.policy_version:
        raise NotRetainedError(
            f"no step of run {run.run_id!r} is retained any more: its payload is gone ({run.payload_gone})",
            policy_version=cursor.next_version,
            oldest_policy_version=run.policy_version + 1,
        )
    names = _names(state, version, cursor.max_groups)
    num_lost = tallies.num_lost_samples(state, version) if version > run.forgotten_version else 0
    if not names and not num_lost and version <= run.policy_version:
        oldest = min((kept for kept in state.index.trained if kept > version), default=run.policy_version + 1)
        raise NotRetainedError(
            f"step {version} of run {run.run_id!r} is no longer retained; the first that is, or will be, is {oldest}",
            policy_version=version,
            oldest_policy_version=oldest,
        )
    return Plan(
        version=version,
        history=run.history,
        names=names,
        num_lost=num_lost,
        max_groups=cursor.max_groups,
        is_closed=run.is_closed,
    )


def _names(state: RunState, version: int, most: int) -> tuple[str, ...]:
    """The step's records in order of submission; of more than `most` some at even distances, unless that is 0."""
    records = sorted((state.groups.sequence(name), name) for name in state.index.trained.get(version, ()))
    num = len(records)
    chosen = records if not most or num <= most else [records[index * num // most] for index in range(most)]
    return tuple(name for _sequence, name in chosen)


def _version_after_rewinds(state: RunState, cursor: Cursor) -> int:
    """The cursor's version, or the first step undone by a rewind that the client does not know of."""
    if cursor.history is None or cursor.history >= state.run.history:
        return cursor.next_version
    unheard = [rewind for rewind in state.run.rewinds if rewind.history > cursor.history]
    if len(unheard) < state.run.history - cursor.history:
        return 0
    return min(cursor.next_version, *(rewind.policy_version + 1 for rewind in unheard))


async def export(
    run_registry: RunRegistry, request: broker_pb2.ExportTrajectoriesRequest
) -> AsyncGenerator[_Response, None]:
    """All responses of an ExportTrajectories call."""
    require(request.from_policy_version >= 0, "from_policy_version", request.from_policy_version, "at least 0")
    cursor = Cursor(
        next_version=request.from_policy_version,
        history=request.history if request.HasField("history") else None,
        max_groups=request.max_groups_per_step,
    )
    replica = run_registry.replica(request.run_id)
    must_verify, spoke_s = True, 0.0
    with replica.listening() as wake:
        while True:
            run_registry.check_serving()
            planned = await replica.transact(partial(plan, cursor=cursor), must_verify=must_verify)
            must_verify = False
            if not planned.is_due and (planned.is_closed or not request.follow):
                return
            num_sent, num_missing = 0, planned.num_lost
            while records := await replica.transact(
                partial(_records, planned=planned, start=num_sent), must_verify=False
            ):
                if is_large(records[0], replica.row_bytes) and request.accepts_group_pieces:
                    left_out: Counter[str] = Counter()
                    async with aclosing(_pieces(replica, planned, records[0], left_out)) as pieces:
                        async for response in pieces:
                            yield response
                    num_sent += 1
                    num_missing += left_out.total()
                    continue
                groups, num_without = await _load(replica, records)
                if num_without and not await _is_still_there(replica, planned):
                    break
                num_sent += len(records)
                num_missing += num_without
                for group in groups:
                    yield _whole(group, planned)
            is_sent = planned.is_due and num_sent == len(planned.names)
            cursor = replace(cursor, next_version=planned.version + is_sent, history=planned.history)
            is_silent = time.monotonic() - spoke_s >= SIGN_OF_LIFE_S
            if (is_sent and num_missing) or (request.follow and (is_sent or is_silent)):
                spoke_s = time.monotonic()
                yield _Response(
                    policy_version=cursor.next_version - 1,
                    history=planned.history,
                    num_missing_samples=num_missing if is_sent else 0,
                )
            await _wait_for_news(run_registry, replica, cursor, wake, spoke_s + SIGN_OF_LIFE_S)


def _records(state: RunState, *, planned: Plan, start: int) -> list[GroupRecord]:
    """Copies of a few of the step's records from position `start`; none if the step has changed."""
    if state.run.history != planned.history or _names(state, planned.version, planned.max_groups) != planned.names:
        return []
    records = (state.groups[name] for name in planned.names[start : start + MAX_BATCH_RECORDS])
    weight = partial(_num_tokens, row_bytes=row_bytes(state))
    return [deepcopy(record) for record in next(batched(records, weight, MAX_BATCH_TOKENS), [])]


def _num_tokens(record: GroupRecord, *, row_bytes: int) -> float:
    """Tokens of a record's groups, and as many as their routes take the space of; a large one is read alone."""
    if is_large(record, row_bytes):
        return math.inf
    if record.HasField("put"):
        return sum(record.put.num_tokens)
    num_tokens = record.num_prompt_tokens + sum(sample.num_tokens for sample in record.samples)
    return size_bytes(record, row_bytes) / BYTES_PER_TOKEN if row_bytes else num_tokens


def _whole(group: types_pb2.TrajectoryGroup, planned: Plan) -> _Response:
    """A group in one message. Raises InvalidFieldError if it does not fit."""
    if group.ByteSize() > MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
        raise too_large(group, field="accepts_group_pieces")
    return _Response(group=group, policy_version=planned.version, history=planned.history)


async def _pieces(
    replica: RunReplica, planned: Plan, record: GroupRecord, left_out: Counter[str]
) -> AsyncGenerator[_Response, None]:
    """A record with groups too many or too large for one message, each in pieces; lost samples are counted."""
    if not record.HasField("put"):
        left_out[record.group_id] += _leave_out_lost(record)
    for portion in single_groups(record):
        async with aclosing(read_pieces(replica, portion, has_text=True, left_out=left_out)) as pieces:
            async for piece in pieces:
                yield _Response(piece=piece, policy_version=planned.version, history=planned.history)


async def _load(replica: RunReplica, records: list[GroupRecord]) -> tuple[list[types_pb2.TrajectoryGroup], int]:
    """The groups of the records with their payload, and the number of samples without payload."""
    num_without = sum(_leave_out_lost(record) for record in records)
    by_id, packed = await load_records(replica, records, has_text=True)
    groups: list[types_pb2.TrajectoryGroup] = []
    for record in records:
        if record.group_id in packed:
            groups += types_pb2.TrajectoryGroups.FromString(bytes(packed[record.group_id])).groups
            num_without += 0 if packed[record.group_id] else len(record.put.sample_tokens)
        elif record.group_id not in by_id:
            num_without += len(kept_indices(record))
        elif by_id[record.group_id].trajectories:
            groups.append(by_id[record.group_id])
    return groups, num_without


def _leave_out_lost(copy: GroupRecord) -> int:
    """Remove samples counted as trained on the trainer's word alone from a record's copy; returns their number.

    Redis lost their last commits, including the score; see `lifecycle`.
    """
    lost = [copy.samples[index] for index in kept_indices(copy) if not copy.samples[index].HasField("score")]
    for sample in lost:
        sample.state = broker_pb2.SAMPLE_STATE_DROPPED
    return len(lost)


async def _is_still_there(replica: RunReplica, planned: Plan) -> bool:
    """Decide whether missing payload is lost, or its step was removed while it was read."""
    if not await replica.transact(partial(_records, planned=planned, start=0)):
        return False
    _log.warning("payload of a step is lost and left out of an export", run_id=replica.run_id, version=planned.version)
    return True


async def _wait_for_news(
    run_registry: RunRegistry, replica: RunReplica, cursor: Cursor, wake: Wake, until_s: float
) -> None:
    """Wait until the copy may have data after `cursor`, or until `until_s` of the monotonic clock."""
    while not run_registry.is_stopping and (timeout_s := until_s - time.monotonic()) > 0:
        run = None if replica.copy is None else replica.copy.run
        if run is None or run.is_closed or run.history != cursor.history or run.policy_version >= cursor.next_version:
            return
        await wait_for_event(wake, timeout_s)
