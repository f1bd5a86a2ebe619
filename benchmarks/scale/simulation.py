"""Plays a fleet larger than any machine here against brokers, as queues on a virtual clock, by measured costs.

Each broker is one core that takes its work in the order of arrival. Token requests go to the owners of the token
shards, evenly; leases, heartbeats and groups all go to one of them, the owner of the run's own record. The intervals
are decided by the brokers' own rules (`FlushInterval`, `HeartbeatInterval`). Tokens, samples' ends and costs are means.
"""

from __future__ import annotations

import heapq
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scale.needs import GROUP_SIZE, LEASE_S, Assumptions, Costs
from penstock.clients.tokens import MAX_UNACKNOWLEDGED
from penstock.heartbeat_interval import BEAT_INTERVAL_S
from services.broker.rules.flush_pacing import UPDATE_EVERY_S, FlushInterval
from services.broker.rules.heartbeat_pacing import HeartbeatInterval

LATE_S = 1.0
"""A broker whose queue is longer at the end does not keep up."""
_REQUEST, _BEAT, _SAMPLE, _UPDATE = range(4)


@dataclass(slots=True)
class _Broker:
    """One core and its queue."""

    flush: FlushInterval
    beats: HeartbeatInterval = field(default_factory=HeartbeatInterval)
    free_s: float = 0.0
    """When it is done with all that has arrived."""
    work_s: float = 0.0
    """Work that arrived since the start."""
    updated_s: float = 0.0
    waits_s: dict[int, list[float]] = field(default_factory=dict)
    """How long each kind of work waited until it was done."""

    def take(self, kind: int, at_s: float, cost_s: float) -> float:
        """Queue work; returns when it is done."""
        self.free_s = max(self.free_s, at_s) + cost_s
        self.work_s += cost_s
        self.waits_s.setdefault(kind, []).append(self.free_s - at_s)
        return self.free_s

    def update(self, at_s: float) -> None:
        """Let the intervals follow the share of time in which it had work, since the last update."""
        done_s = self.work_s - max(0.0, self.free_s - at_s)
        self.flush.update((done_s - self.updated_s) / UPDATE_EVERY_S)
        self.beats.update(self.flush.load, UPDATE_EVERY_S)
        self.updated_s = done_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is played."""

    num_generators: int
    num_brokers: int
    seconds: float
    seed: int = 0


def simulate(fleet: Fleet, assumed: Assumptions, costs: Costs) -> dict[str, Any]:
    """Play it; waits are of the second half of the time, when flush intervals have settled."""
    brokers = [
        _play(fleet, assumed, costs, owner=number, rng=random.Random(fleet.seed + number))
        for number in range(min(2, fleet.num_brokers))
    ]
    # All owners of shards alone are alike: one stands for them.
    run_owner, other = brokers[0], brokers[-1]
    return {
        "num_generators": fleet.num_generators,
        "num_brokers": fleet.num_brokers,
        "run_owner": _report(run_owner, fleet.seconds),
        "others": _report(other, fleet.seconds),
        "keeps_up": all(each.free_s - fleet.seconds < LATE_S for each in brokers),
    }


def _play(fleet: Fleet, assumed: Assumptions, costs: Costs, *, owner: int, rng: random.Random) -> _Broker:
    """One broker's share; broker 0 owns the run's own record, too."""
    broker = _Broker(FlushInterval(assumed.longest_flush_s))
    generators = range(owner, fleet.num_generators, fleet.num_brokers)
    taken_s = dict.fromkeys(generators, 0.0)
    events = [(rng.random() * assumed.flush_s, _REQUEST, number) for number in generators]
    events.append((UPDATE_EVERY_S, _UPDATE, 0))
    sample_s = assumed.mean_tokens / (fleet.num_generators * assumed.tokens_per_gpu_s)
    if owner == 0:
        events += [(rng.random() * BEAT_INTERVAL_S, _BEAT, number) for number in range(fleet.num_generators)]
        events.append((rng.expovariate(1 / sample_s), _SAMPLE, 0))
    heapq.heapify(events)
    beat_s = (costs.us_per_heartbeat + assumed.samples_per_gpu * costs.us_per_lease_kept) / 1e6
    sample_cost_s = (costs.us_per_lease + costs.us_per_group / GROUP_SIZE) / 1e6
    while (event := heapq.heappop(events))[0] < fleet.seconds:
        at_s, kind, number = event
        if kind == _REQUEST:
            tokens = assumed.tokens_per_gpu_s * (at_s - taken_s[number])
            taken_s[number] = at_s
            done_s = broker.take(kind, at_s, _request_s(tokens, assumed, costs))
            interval_s = max(assumed.flush_s, broker.flush.asked_s)
            next_s = max(at_s + interval_s, done_s - (MAX_UNACKNOWLEDGED - 1) * interval_s)
        elif kind == _BEAT:
            broker.take(kind, at_s, beat_s)
            broker.beats.note_beat()
            next_s = at_s + (broker.beats.asked_s(LEASE_S) or BEAT_INTERVAL_S)
        elif kind == _SAMPLE:
            broker.take(kind, at_s, sample_cost_s)
            next_s = at_s + rng.expovariate(1 / sample_s)
        else:
            broker.update(at_s)
            next_s = at_s + UPDATE_EVERY_S
        heapq.heappush(events, (next_s, kind, number))
    return broker


def _request_s(num_tokens: float, assumed: Assumptions, costs: Costs) -> float:
    """CPU time of a request with these tokens of all samples of a generator."""
    num_chunks = min(num_tokens, assumed.samples_per_gpu)
    return (costs.us_per_request + num_chunks * costs.us_per_chunk + num_tokens * costs.us_per_token) / 1e6


def _report(broker: _Broker, seconds: float) -> dict[str, Any]:
    names = {_REQUEST: "request", _BEAT: "heartbeat", _SAMPLE: "lease"}
    waits = {
        name: _quantiles(broker.waits_s[kind][len(broker.waits_s[kind]) // 2 :])
        for kind, name in names.items()
        if kind in broker.waits_s
    }
    return {
        "load": broker.work_s / seconds,
        "flush_interval_s": max(0.2, broker.flush.asked_s),
        "heartbeat_interval_s": broker.beats.asked_s(LEASE_S) or BEAT_INTERVAL_S,
        "queue_s": max(0.0, broker.free_s - seconds),
        "waits_ms": waits,
    }


def _quantiles(waits_s: list[float]) -> dict[str, float]:
    if len(waits_s) < 2:
        return {}
    cuts = statistics.quantiles(waits_s, n=100)
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98], "max": 1e3 * max(waits_s)}
