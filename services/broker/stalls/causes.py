"""Finds what stalls a run's work, in words: what is missing, silent or behind, and what will happen when. Pure.

Cheap on purpose: looks at connections, the heads of queues and leases (some of very many), never at every queued group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.timestamps import unix_s
from services.broker.records.store import SampleId
from services.broker.records_pb2 import SampleRecord, WorkerView
from services.broker.state.queue_entry import (
    REFERENCE,
    REWARD,
    Leases,
    ScoringTask,
    next_task,
    num_waiting_for,
    waiting_for,
)
from services.broker.state.run_state import RunState

TRAIN, EVALUATE = types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVALUATE
_LEASED, _SCORING = broker_pb2.SAMPLE_STATE_LEASED, broker_pb2.SAMPLE_STATE_SCORING
SILENT_AFTER_S = 10.0
"""A generator sends a heartbeat at least every 5 s; after twice that it counts as silent."""
MAX_LOOKED = 4_096
"""Leases among which the longest silent one is looked for, about 5 ms."""
MAX_SILENT = 32
"""Silent generators that are reported one by one."""
SUBMITTER, GENERATORS, TRAINER = "submitter of prompts", "generators", "trainer"
WORKERS: Mapping[ScoringTask, str] = {REWARD: "reward worker", REFERENCE: "scorer"}
"""Who does what a finished sample waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The peers connected to any broker process."""

    generators: Sequence[broker_pb2.GeneratorView]
    """Generators seen in the last minute."""
    worker_ids: Collection[str]
    """Reward workers seen in the last seconds."""
    scorer_ids: Collection[str] = ()
    """Scorers seen in the last seconds."""
    holding: Mapping[str, WorkerView] = field(default_factory=dict)
    """The reward workers and scorers that hold leases without scoring."""

    def speaking(self, now_s: float) -> list[broker_pb2.GeneratorView]:
        """The generators that are not silent."""
        return [view for view in self.generators if now_s - _beat_s(view) < SILENT_AFTER_S]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One party waits for another."""

    waiter: str
    owner: str
    """The party that can end it, for example "generator gen-2"."""
    text: str
    """Why, in words."""
    since_s: float
    deadline_s: float | None = None
    """When action will be taken; None if none is due."""

    def of(self, waiter: str, prefix: str) -> Cause:
        """The same stall for a party that waits for it in turn."""
        return replace(self, waiter=waiter, text=prefix + self.text)


def stalls(state: RunState, present: Present, now_s: float) -> list[Cause]:
    """The problems, worst first: missing, silent, lagging parties."""
    return [
        *_silent_generators(state, present, now_s),
        *_no_generator(state, present, now_s),
        *_no_worker(state, present, now_s),
        *_lost_workers(state, present, now_s),
        *_holding_workers(state, present),
        *_lagging_generators(state, present, now_s),
    ]


def progress(state: RunState, purpose: int, now_s: float) -> Cause | None:
    """What groups of a purpose wait for in normal operation: their slowest part, nearest to the trainer last."""
    for found in (
        _decoding(state, purpose, now_s),
        _sealing(state, purpose),
        _scoring(state, purpose, now_s),
        _unscored(state, purpose),
        _queued(state, purpose),
    ):
        if found is not None:
            return found
    return None


def counted(number: int, noun: str, one: str = "", many: str = "") -> str:
    """For example "1 group", or with the verb "1 group waits", "3 groups wait"."""
    words = f"{number} {noun} {one}" if number == 1 else f"{number} {noun}s {many}"
    return words.rstrip()


def name_of(sample: SampleId) -> str:
    """For example "sample g17/5"."""
    return f"sample {sample[0]}/{sample[1]}"


def _no_generator(state: RunState, present: Present, now_s: float) -> Iterator[Cause]:
    """No peer to take queued work; a generator that went silent does not count."""
    if not state.queue or present.speaking(now_s):
        return
    last_s = max((_beat_s(view) for view in present.generators), default=None)
    text = f"no generator is connected; {counted(len(state.queue), 'group', 'waits', 'wait')} for one"
    if last_s is not None:
        text += f", the last one was heard from {now_s - last_s:.0f} s ago"
    since_s = max(last_s or 0.0, _first_submit_s(state))
    yield Cause(waiter="groups", owner=GENERATORS, text=text, since_s=since_s)


def _first_submit_s(state: RunState) -> float:
    for rank in state.queue[:1]:
        group = state.groups.at(rank[-1])
        if group is not None:
            return group.submit_s
    return state.run.version_s


def _no_worker(state: RunState, present: Present, now_s: float) -> Iterator[Cause]:
    for task, ids in ((REWARD, present.worker_ids), (REFERENCE, present.scorer_ids)):
        count = num_waiting_for(state.finished, task)
        if count and not ids:
            since_s, worker = _first_finish_s(state, task), WORKERS[task]
            text = f"no {worker} is connected; {counted(count, 'finished sample', 'waits', 'wait')}"
            yield Cause(waiter="samples", owner=f"{worker}s", text=f"{text} {_for(since_s, now_s)}", since_s=since_s)


def _silent_generators(state: RunState, present: Present, now_s: float) -> list[Cause]:
    """Generators that hold leases and are silent, the longest silent ones of many."""
    heard_s = {view.hello.generator_id: _beat_s(view) for view in present.generators}
    silent = [name for name in state.generation_leases if now_s - heard_s.get(name, -math.inf) >= SILENT_AFTER_S]
    found = []
    for generator_id in sorted(silent, key=lambda name: heard_s.get(name, -math.inf))[:MAX_SILENT]:
        held = state.generation_leases[generator_id]
        samples = [(key, state.groups[key[0]].samples[key[1]]) for key in held.values()]
        key, sample = min(samples, key=lambda item: state.lease_end_s(item[1]))
        end_s = state.lease_end_s(sample)
        since_s = heard_s.get(generator_id, max(sample.last_chunk_s, sample.lease_s))
        if now_s - since_s < SILENT_AFTER_S:
            continue
        more = f" and {len(held) - 1} more are" if len(held) > 1 else " is"
        text = (
            f"{name_of(key)}{more} leased by {generator_id}, silent {_for(since_s, now_s)}, "
            f"lease ends {_due(end_s, now_s)}, then another continues from token {sample.num_tokens}"
        )
        waiter, owner = counted(len(held), "sample"), f"generator {generator_id}"
        found.append(Cause(waiter=waiter, owner=owner, text=text, since_s=since_s, deadline_s=end_s))
    return sorted(found, key=lambda cause: cause.since_s)


def _lost_workers(state: RunState, present: Present, now_s: float) -> Iterator[Cause]:
    for worker_id, held in state.scoring_leases.items():
        if worker_id in present.worker_ids or worker_id in present.scorer_ids:
            continue
        samples = [(key, state.groups[key[0]].samples[key[1]]) for key in held.values()]
        key, sample = min(samples, key=lambda item: item[1].scoring_expire_s)
        text = (
            f"{name_of(key)} is scored by {worker_id}, which is gone, "
            f"lease ends {_due(sample.scoring_expire_s, now_s)}, then another scores it"
        )
        waiter, owner = counted(len(held), "sample"), f"{WORKERS[next_task(sample)]} {worker_id}"
        yield Cause(waiter=waiter, owner=owner, text=text, since_s=sample.finish_s, deadline_s=sample.scoring_expire_s)


def _holding_workers(state: RunState, present: Present) -> Iterator[Cause]:
    for worker_id, view in present.holding.items():
        held = state.scoring_leases.get(worker_id, {})
        if held:
            text = f"{worker_id} holds {counted(len(held), 'finished sample')}: {view.holding_reason}"
            waiter, owner = counted(len(held), "sample"), f"{WORKERS[view.task or REWARD]} {worker_id}"
            yield Cause(waiter=waiter, owner=owner, text=text, since_s=view.holding_since_s)


def _lagging_generators(state: RunState, present: Present, now_s: float) -> Iterator[Cause]:
    """Generators whose old version is the only obstacle to starting waiting groups."""
    num_waiting, version = state.num_waiting(TRAIN), state.run.policy_version
    versions = {view.hello.generator_id: view.beat.policy_version for view in present.speaking(now_s)}
    if not num_waiting or not versions or any(may_start(state, held) for held in versions.values()):
        return
    if may_start(state, version):
        generator_id = min(versions, key=lambda name: versions[name])
        text = (
            f"admission holds {counted(num_waiting, 'group')} back: "
            f"generator {generator_id} is at version {versions[generator_id]}, trainer at {version}"
        )
        yield Cause(
            waiter=counted(num_waiting, "group"),
            owner=f"generator {generator_id}",
            text=text,
            since_s=state.run.version_s,
        )


def may_start(state: RunState, generator_version: int) -> bool:
    """Whether admission lets a generator at a version start another training group."""
    return state.admission().judge(generator_version=generator_version).is_allowed


def _decoding(state: RunState, purpose: int, now_s: float) -> Cause | None:
    """The leased sample whose last sign of life is oldest."""
    held = _held(state, state.generation_leases, _LEASED, purpose, now_s)
    if held is None:
        return None
    key, sample = min(held.examples, key=lambda item: _heard_s(item[1]))
    heard_s = _heard_s(sample)
    if now_s - heard_s >= SILENT_AFTER_S:
        words = f"is leased by {sample.generator_id}, silent {_for(heard_s, now_s)} while {sample.generator_id} lives"
    elif sample.num_tokens:
        so_far = f"{counted(sample.num_tokens, 'token')} so far"
        words = f"is decoded by {sample.generator_id} {_for(sample.lease_s, now_s)}, {so_far}"
    else:
        words = f"is leased by {sample.generator_id} {_for(sample.lease_s, now_s)}, no token yet"
    end_s = state.lease_end_s(sample)
    text = f"{name_of(key)} {words}, lease ends {_due(end_s, now_s)} unless renewed"
    owner = f"generator {sample.generator_id}"
    waiter = counted(held.count, "sample")
    return Cause(waiter=waiter, owner=owner, text=text, since_s=heard_s, deadline_s=end_s)


def _sealing(state: RunState, purpose: int) -> Cause | None:
    keys = [key for key in state.sealing if _purpose(state, key) == purpose]
    if not keys:
        return None
    key = min(keys, key=lambda key: _heard_s(_sample(state, key)))
    text = f"{name_of(key)} lost its lease; its shard must say how many of its tokens are stored before it is queued"
    owner = f"token shard {state.groups[key[0]].token_shard}"
    return Cause(waiter=counted(len(keys), "sample"), owner=owner, text=text, since_s=_heard_s(_sample(state, key)))


def _scoring(state: RunState, purpose: int, now_s: float) -> Cause | None:
    held = _held(state, state.scoring_leases, _SCORING, purpose, now_s)
    if held is None:
        return None
    key, sample = min(held.examples, key=lambda item: item[1].finish_s)
    text = (
        f"{name_of(key)} is scored by {sample.worker_id}, finished {now_s - sample.finish_s:.0f} s ago, "
        f"lease ends {_due(sample.scoring_expire_s, now_s)} unless renewed"
    )
    owner, waiter = f"{WORKERS[next_task(sample)]} {sample.worker_id}", counted(held.count, "sample")
    return Cause(
        waiter=waiter,
        owner=owner,
        text=text,
        since_s=sample.finish_s,
        deadline_s=sample.scoring_expire_s,
    )


def _unscored(state: RunState, purpose: int) -> Cause | None:
    for task in (REFERENCE, REWARD):
        begin = state.finished.bisect_left((task, int(purpose == TRAIN), 0, 0))
        count = state.finished.bisect_left((task, 1 + int(purpose == TRAIN), 0, 0)) - begin
        if count:
            text = f"{counted(count, 'finished sample', 'waits', 'wait')} for a free {WORKERS[task]}"
            since_s = _first_finish_s(state, task)
            return Cause(waiter="samples", owner=f"{WORKERS[task]}s", text=text, since_s=since_s)
    return None


def _queued(state: RunState, purpose: int) -> Cause | None:
    num_waiting = state.num_waiting(purpose)
    if not num_waiting:
        return None
    text = f"{counted(num_waiting, 'group', 'waits', 'wait')} for a free slot of a generator"
    if purpose == TRAIN and not may_start(state, state.run.policy_version):
        text = f"admission holds {counted(num_waiting, 'group')} back until the trainer finishes a step"
    return Cause(waiter="groups", owner=GENERATORS, text=text, since_s=state.run.version_s)


def _beat_s(view: broker_pb2.GeneratorView) -> float:
    return unix_s(view.beat_time)


@dataclass(frozen=True, slots=True)
class _Held:
    """Samples of a purpose that are leased."""

    count: int
    examples: list[tuple[SampleId, SampleRecord]]
    """All of them, or of very many those of some holders: each second of others."""


def _held(
    state: RunState, leases: Leases, status: broker_pb2.SampleState.ValueType, purpose: int, now_s: float
) -> _Held | None:
    """The samples of a purpose that are leased, and so in that state; None if there are none."""
    num_leases = sum(map(len, leases.values()))
    num_training = state.index.num_samples[status]
    count = num_training if purpose == TRAIN else num_leases - num_training
    if not count:
        return None
    holders, stride = list(leases.values()), 1 + num_leases // MAX_LOOKED
    for start in range(stride):
        found: list[tuple[SampleId, SampleRecord]] = []
        for held in holders[(start + int(now_s)) % stride :: stride]:
            for key in held.values():
                group = state.groups[key[0]]
                if group.purpose == purpose:
                    found.append((key, group.samples[key[1]]))
        if found:
            return _Held(count, found)
    return None


def _sample(state: RunState, key: SampleId) -> SampleRecord:
    return state.groups[key[0]].samples[key[1]]


def _purpose(state: RunState, sample: SampleId) -> int:
    return state.groups[sample[0]].purpose


def _heard_s(sample: SampleRecord) -> float:
    return max(sample.last_chunk_s, sample.lease_s)


def _first_finish_s(state: RunState, task: ScoringTask) -> float:
    for _task, _purpose_flag, sequence, index in islice(waiting_for(state.finished, task), 1):
        group = state.groups.at(sequence)
        if group is not None:
            return group.samples[index].finish_s
    return state.run.version_s


def _for(since_s: float, now_s: float) -> str:
    return f"for {max(0.0, now_s - since_s):.0f} s"


def _due(deadline_s: float, now_s: float) -> str:
    return f"in {max(0.0, deadline_s - now_s):.0f} s"
