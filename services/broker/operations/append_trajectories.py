"""Adds finished groups to the run: the records' side of PutTrajectories. Pure operations on a RunState.

Promises:
- A put is stored once: groups that the run knows are accepted again without effect, in whatever request they arrive.
- Unless the run's StalenessPolicy accepts late puts, a group that would be too stale by the time it is trained
  is refused; it is never accepted and then dropped.
- The payload that waits for the trainer, and all that the run has in the store, is bounded: beyond that a whole request
  is refused, to be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from penstock.errors import InvalidFieldError, PenstockError, StaleError
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed
from penstock.wire.routes import num_route_rows, routes_fault
from services.broker.ingest.trajectory_columns import PutGroup, PutGroups
from services.broker.ingest.validation import item_error
from services.broker.operations import drops
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.staleness import deadline
from services.broker.state import counters
from services.broker.state.run_state import RunState

MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Bound on a run's payload that waits for its trainer; more is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A request to store groups."""

    payload_id: str
    payload: Packed
    groups: PutGroups
    is_stored_ahead: bool = False
    """Whether the store already has the payload, temporarily: see `Store.put_payload`."""


@dataclass(slots=True, kw_only=True)
class PutOutcome:
    """The outcome of a put."""

    num_samples: int = 0
    """Samples added to the counters."""
    errors: list[types_pb2.ItemError] = field(default_factory=list)
    """The groups that were refused."""
    is_full: bool = False
    """Whether the whole request was refused because too much payload waits already."""


def put(state: RunState, request: Put, now_s: float) -> PutOutcome:
    """Store the groups of a request that are new and fit the run.

    Raises RunClosedError, and InvalidFieldError when the request has more groups than a step.
    """
    state.check_open()
    if state.policy.needs_reference_logprobs:
        raise InvalidFieldError(
            "groups: the run asks for log-probs of a reference, which no scorer computes for groups that are put; "
            "train with algorithm.reference: trainer",
            field="groups",
        )
    if len(request.groups) > state.limits.groups_per_step:
        raise InvalidFieldError(
            f"groups: {len(request.groups)} groups; at most groups_per_step, {state.limits.groups_per_step}",
            field="groups",
        )
    outcome = PutOutcome()
    if _are_all_welcome(state, request.groups):
        # The common case.
        fresh, is_stored = list(range(len(request.groups))), [True] * len(request.groups)
    else:
        fresh, is_stored = _choose(state, request.groups, outcome)
    if is_full(state, len(fresh), len(request.payload)):
        return PutOutcome(is_full=True)
    for start, end in _runs(is_stored):
        state.add(_record(state, request, start, end, now_s))
    if any(is_stored):
        state.pending.payloads[request.payload_id] = b"" if request.is_stored_ahead else request.payload
    outcome.num_samples = _enter(state, request.groups, fresh, is_stored)
    return outcome


def _are_all_welcome(state: RunState, groups: PutGroups) -> bool:
    """Whether all groups are new, fit the run and should be stored. May be false although `_choose` accepts each."""
    return (
        not any(groups.faults)
        and state.limits.routing is None
        and not any(routes.num_bytes for routes in groups.routes)
        and len(set(groups.group_ids)) == len(groups)
        and not state.knows_any(groups.group_ids)
        and _Judge(state).error(groups.worst(), num_before=len(groups) - 1) is None
        and not (state.policy.drops_zero_variance and max(groups.num_samples) > 1)
    )


def _choose(state: RunState, groups: PutGroups, outcome: PutOutcome) -> tuple[list[int], list[bool]]:
    """The groups that are new and fit the run, and whether to store each; refusals go to the outcome."""
    seen: set[str] = set()
    fresh: list[int] = []
    judge = _Judge(state)
    is_stored: list[bool] = []
    for position, group in enumerate(groups):
        is_known = group.group_id in seen or state.knows(group.group_id)
        error = None if is_known else judge.error(group, num_before=len(fresh))
        if error is not None:
            outcome.errors.append(item_error(position, error))
        elif not is_known:
            seen.add(group.group_id)
            fresh.append(position)
        is_stored.append(not is_known and error is None and not _is_idle(state, group.rewards))
    return fresh, is_stored


class _Judge:
    """Whether the run can take a group that is valid by itself."""

    def __init__(self, state: RunState) -> None:
        self._limits, self._version = state.limits, state.run.policy_version
        self._admission = state.admission()
        self._must_be_in_time = not state.policy.stale.accepts_late_puts

    def error(self, group: PutGroup, *, num_before: int) -> PenstockError | None:
        """Why the group is refused; `num_before` groups of the request go before this one."""
        fault = group.fault or self._misfit(group)
        if fault:
            return InvalidFieldError(f"group {group.group_id!r}: {fault}")
        oldest, bound = min(group.min_versions), self._limits.max_staleness
        if deadline(version=oldest, max_staleness=bound) < self._version:
            text = f"version {oldest} is more than {bound} behind the run's {self._version}"
        elif self._must_be_in_time and (ahead := self._admission.num_started + num_before) >= (
            self._admission.max_started(oldest)
        ):
            text = f"{ahead} groups go before it: it would be too stale by its turn"
        else:
            return None
        return StaleError(f"group {group.group_id!r}: {text}")

    def _misfit(self, group: PutGroup) -> str:
        limits = self._limits
        if len(group.sample_tokens) > limits.group_size:
            return f"trajectories: {len(group.sample_tokens)}; at most the run's group size, {limits.group_size}"
        if max(group.sample_tokens) > limits.max_completion_tokens:
            return f"token_ids: {max(group.sample_tokens)} tokens; the run allows {limits.max_completion_tokens}"
        if max(group.max_versions) > self._version:
            return f"policy version {max(group.max_versions)} is ahead of the run's {self._version}"
        faults = (
            routes_fault(
                limits.routing, routes, num_route_rows(num_tokens=count, num_prompt_tokens=group.num_prompt_tokens)
            )
            for count, routes in zip(group.sample_tokens, group.routes, strict=True)
        )
        return next(filter(None, faults), "")


def _is_idle(state: RunState, rewards: Sequence[float]) -> bool:
    """Whether a group of these rewards is dropped on arrival because it carries no gradient."""
    return state.policy.drops_zero_variance and len(rewards) > 1 and min(rewards) == max(rewards)


def is_full(state: RunState, num_groups: int, size_bytes: int) -> bool:
    """Whether there is no capacity: too much payload waits, or the run has all that its policy allows in the store.

    No request is too large for a run in which nothing waits, nor for one that has no whole step yet.
    """
    index = state.index
    num_waiting, waiting_bytes = index.num_ready_puts, index.ready_bytes
    has_step = index.num_started >= state.limits.groups_per_step
    if num_groups and has_step and index.live_bytes + size_bytes > state.policy.max_live_bytes:
        return True
    if not num_groups or not num_waiting:
        return False
    return num_waiting + num_groups > state.limits.max_queued_groups or waiting_bytes + size_bytes > MAX_WAITING_BYTES


def _enter(state: RunState, groups: PutGroups, fresh: Sequence[int], is_stored: Sequence[bool]) -> int:
    """Count new groups, including those dropped at once; returns the number of samples."""
    version = state.run.policy_version
    state.pending.fresh += [groups.group_ids[position] for position in fresh]
    num_samples = sum(groups.num_samples[position] for position in fresh)
    idle = [position for position in fresh if not is_stored[position]]
    slices = groups.sample_slices() if idle else []
    for position in idle:
        start, end = slices[position]
        for num_tokens in groups.sample_tokens[start:end]:
            counters.count_dropped(state, version=version, num_tokens=num_tokens, reason=drops.ZERO_VARIANCE)
        state.pending.retired.add(groups.group_ids[position])
    counters.count_submitted(state, version=version, num_samples=num_samples)
    return num_samples


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Start and end of each run of consecutive true flags."""
    found: list[tuple[int, int]] = []
    start = 0
    for flag, members in groupby(flags):
        end = start + sum(1 for _ in members)
        if flag:
            found.append((start, end))
        start = end
    return found


def _record(state: RunState, request: Put, start: int, end: int, now_s: float) -> GroupRecord:
    groups, members = request.groups, slice(start, end)
    sample_slices = groups.sample_slices()[members]
    samples = slice(sample_slices[0][0], sample_slices[-1][1])
    prompts = groups.num_prompt_tokens[members]
    record = GroupRecord(
        group_id=groups.group_ids[start],
        sequence=state.run.last_sequence + 1,
        purpose=types_pb2.PURPOSE_TRAIN,
        submit_version=state.run.policy_version,
        submit_s=now_s,
    )
    # Filled in place: assigning a message to another one's field copies it.
    columns = record.put
    columns.payload_id = request.payload_id
    columns.payload_start = groups.slices[start][0]
    columns.group_ids.extend(groups.group_ids[members])
    columns.group_bytes.extend([after - before for before, after in groups.slices[members]])
    columns.num_samples.extend(groups.num_samples[members])
    columns.num_tokens.extend(
        [
            sum(groups.sample_tokens[first:last]) + num_prompt_tokens * (last - first)
            for (first, last), num_prompt_tokens in zip(sample_slices, prompts, strict=True)
        ]
    )
    columns.sample_tokens.extend(groups.sample_tokens[samples])
    columns.sample_min_versions.extend(groups.min_versions[samples])
    columns.sample_max_versions.extend(groups.max_versions[samples])
    state.run.last_sequence += end - start
    return record
