"""Who waits for whom, in plain words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from penstock.v1 import broker_pb2, types_pb2
from services.broker.delivery import step_view
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.run_state import RunState
from services.broker.store import SampleId

_TRAIN = types_pb2.PURPOSE_TRAIN
_WAITING_FOR_SCORES = frozenset((broker_pb2.SAMPLE_STATE_FINISHED, broker_pb2.SAMPLE_STATE_SCORING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """For whom somebody waits, and why."""

    owner: str
    text: str
    since_s: float
    deadline_s: float | None = None


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as a message."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def group_stage(group: GroupRecord) -> str:
    """queued, leased, scoring, ready, delivered or trained: how far its slowest sample is."""
    if group.HasField("trained_version"):
        return "trained"
    if group.consumer_id:
        return "delivered"
    states = {sample.state for sample in group.samples}
    if broker_pb2.SAMPLE_STATE_LEASED in states:
        return "leased"
    if broker_pb2.SAMPLE_STATE_QUEUED in states:
        return "queued"
    return "scoring" if states & _WAITING_FOR_SCORES else "ready"


def stages(state: RunState) -> Counter[str]:
    """Live training groups in each stage."""
    return Counter(group_stage(group) for group in _live(state))


def waiting(state: RunState, now_s: float) -> broker_pb2.Waiting:
    """What to tell a trainer that gets nothing."""
    counts = stages(state)
    return broker_pb2.Waiting(
        reason=trainer_reason(state, now_s).text,
        num_queued_groups=counts["queued"],
        num_leased_groups=counts["leased"],
        num_scoring_groups=counts["scoring"],
    )


def trainer_reason(state: RunState, now_s: float) -> Reason:
    """For whom the trainer waits."""
    counts, since_s = stages(state), state.run.version_s
    if not counts:
        return Reason(owner="trainer", text="no training group is in flight: submit prompts", since_s=since_s)
    if counts["delivered"] >= state.limits.groups_per_step:
        text = f"all {counts['delivered']} groups of this step are handed out: acknowledge the step"
        return Reason(owner="trainer", text=text, since_s=since_s)
    parts = [f"{counts[stage]} {words}" for stage, words in _STAGE_WORDS if counts[stage]]
    oldest = _oldest_lease(state)
    if oldest is not None:
        (group_id, index), sample = oldest
        parts.append(f"oldest sample {group_id}/{index} on {sample.generator_id} for {now_s - sample.lease_s:.0f} s")
        owner = f"generator {sample.generator_id}"
        return Reason(owner=owner, text="; ".join(parts), since_s=sample.lease_s, deadline_s=sample.lease_expire_s)
    if counts["scoring"]:
        return Reason(owner="reward workers", text="; ".join(parts), since_s=_oldest_finish_s(state))
    if counts["ready"] and not counts["queued"]:
        num_due = step_view(state).num_due
        parts.append(f"{num_due} due groups must come first, so that none becomes too stale")
    return Reason(owner="generators", text="; ".join(parts), since_s=since_s)


_STAGE_WORDS = (
    ("queued", "groups wait for a generator"),
    ("leased", "groups are being decoded"),
    ("scoring", "groups wait for scores"),
    ("ready", "groups are ready"),
    ("delivered", "groups are handed out"),
)


def waits(state: RunState, generators: Iterable[broker_pb2.GeneratorView], now_s: float) -> list[broker_pb2.Wait]:
    """Everybody who waits now."""
    found = [_wait("trainer", trainer_reason(state, now_s))]
    if state.finished:
        text = f"{len(state.finished)} finished samples wait for a reward worker"
        found.append(_wait("samples", Reason(owner="reward workers", text=text, since_s=_oldest_finish_s(state))))
    for view in generators:
        if not state.generation_leases.get(view.hello.generator_id):
            text = "it holds no lease: " + (
                "admission holds new groups back until the trainer finishes a step"
                if state.queue
                else "the queue of prompts is empty"
            )
            waiter = f"generator {view.hello.generator_id}"
            found.append(_wait(waiter, Reason(owner="trainer", text=text, since_s=state.run.version_s)))
    return found


def _wait(waiter: str, reason: Reason) -> broker_pb2.Wait:
    wait = broker_pb2.Wait(waiter=waiter, owner=reason.owner, reason=reason.text, since_time=timestamp(reason.since_s))
    if reason.deadline_s is not None:
        wait.deadline_time.CopyFrom(timestamp(reason.deadline_s))
    return wait


def _live(state: RunState) -> list[GroupRecord]:
    return [group for group_id in state.live if (group := state.groups[group_id]).purpose == _TRAIN]


def _oldest_lease(state: RunState) -> tuple[SampleId, SampleRecord] | None:
    leased = [
        ((group_id, index), state.groups[group_id].samples[index])
        for held in state.generation_leases.values()
        for group_id, index in held.values()
        if state.groups[group_id].purpose == _TRAIN
    ]
    return min(leased, key=lambda item: item[1].lease_s, default=None)


def _oldest_finish_s(state: RunState) -> float:
    return min(
        (sample.finish_s for group in _live(state) for sample in group.samples if sample.state in _WAITING_FOR_SCORES),
        default=state.run.version_s,
    )
