"""Measures one broker under a whole fleet: what a lease, a chunk, a heartbeat and a group cost it there.

Costs are CPU seconds of the broker's process divided by what it did, less what the heartbeats of the same fleet take:
windows with nothing but heartbeats alternate with windows of chunks.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.broker.processes import CpuMeter
from benchmarks.command import Progress
from benchmarks.resident import resident_mb
from benchmarks.scale import meters
from benchmarks.scale.emulated_run import EmulatedRun, Load, Phase, Scene, Served, emulated_run

RUN = "scale"


async def measure(
    scene: Scene,
    load: Load,
    *,
    num_processes: int,
    chunk_tokens: Sequence[int],
    num_repetitions: int,
    idle_s: float,
    leases_over_s: float,
    progress: Progress,
) -> dict[str, Any]:
    """One run from the first lease to the last acknowledgement."""
    stage, broker = scene
    workers = [await stage.start_worker() for _ in range(num_processes)]
    trainer = await stage.start_worker()
    empty = await _idle_share(broker, idle_s)
    progress(f"fleet: connecting {load.num_generators} generators")
    async with emulated_run(stage, [broker], workers, load, run_id=RUN) as run:
        bare = await _heartbeats(run, broker, idle_s)
        progress(f"fleet: leasing {load.num_samples} samples")
        leasing = await run.lease(over_s=leases_over_s)
        before = await meters.Metrics.read(broker.metrics_port)
        windows = await _windows(run, broker, chunk_tokens, num_repetitions, idle_s, progress)
        after = await meters.Metrics.read(broker.metrics_port)
        broker_mb = resident_mb(broker.process.pid)
        progress(f"fleet: ending, scoring and training {load.num_groups} groups")
        finishing = await run.finish(trainer, over_s=leases_over_s)
        sent_late_s = await run.leave()
        last = await meters.Metrics.read(broker.metrics_port)
    idle = statistics.median(each.phase.brokers_share for each in windows.idle)
    bare_us = bare.us_per_heartbeat(empty)
    idle_us = statistics.median(each.us_per_heartbeat(empty) for each in windows.idle)
    return {
        "num_generators": load.num_generators,
        "samples_each": load.samples_each,
        "num_processes": num_processes,
        "us_per_lease": _us(leasing, idle, load.num_samples),
        "leasing_s": leasing.took_s,
        "us_per_group_delivered": _us(finishing, idle, load.num_groups),
        "delivering_s": finishing.took_s,
        "idle_core_percent": 100 * idle,
        "heartbeats_per_second": statistics.median(each.per_second for each in windows.idle),
        "empty_core_percent": 100 * empty,
        "us_per_heartbeat": bare_us,
        "us_per_lease_kept": max(0.0, idle_us - bare_us) / load.samples_each,
        **windows.costs(),
        "loop_lag_ms": {
            "p50": 1e3 * meters.quantile([before], [after], meters.STALLS, 0.5),
            "p99": 1e3 * meters.quantile([before], [after], meters.STALLS, 0.99),
            "max": 1e3 * after.total(meters.LONGEST_STALL),
        },
        "heartbeat_late_max_s": last.total(meters.LONGEST_DELAY),
        "heartbeat_sent_late_max_s": sent_late_s,
        "broker_mb": broker_mb,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Idle:
    """A window with nothing but heartbeats."""

    phase: Phase
    num_heartbeats: float

    @property
    def per_second(self) -> float:
        """How many came: fewer where a busy broker asks for that."""
        return self.num_heartbeats / self.phase.took_s

    def us_per_heartbeat(self, empty: float) -> float:
        """CPU time of each, beyond the share of a core that a broker without a run uses."""
        used_us = 1e6 * max(0.0, self.phase.brokers_share - empty)
        return used_us / self.per_second if self.per_second else 0.0


async def _heartbeats(run: EmulatedRun, broker: Served, seconds: float) -> _Idle:
    """Let so much time pass."""
    before = await meters.Metrics.read(broker.metrics_port)
    phase = await run.idle(seconds)
    after = await meters.Metrics.read(broker.metrics_port)
    count = f"{meters.GAPS}_count"
    return _Idle(phase=phase, num_heartbeats=after.total(count) - before.total(count))


async def _idle_share(broker: Served, seconds: float) -> float:
    """Cores that a broker without any run uses."""
    meter, start_s = CpuMeter(broker=broker.process), time.monotonic()
    await asyncio.sleep(seconds)
    return meter.used_s()["broker"] / (time.monotonic() - start_s)


class _Windows:
    """The windows of a fleet that streams."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.idle: list[_Idle] = []
        self._costs: dict[int, list[dict[str, float]]] = {}

    def add(self, idle: Phase, num_tokens: int, phase: Phase, redis: tuple[float, float, float]) -> None:
        """Add a window of chunks of this many tokens after one of heartbeats; `redis`: bytes kept, read and sent."""
        num_chunks = phase.total("num_chunks")
        broker_s = (phase.brokers_share - idle.brokers_share) * phase.took_s
        redis_s = (phase.redis_share - idle.redis_share) * phase.took_s
        self._costs.setdefault(num_tokens, []).append(
            {
                "broker_us_per_chunk": 1e6 * broker_s / num_chunks,
                "redis_us_per_chunk": 1e6 * redis_s / num_chunks,
                **{
                    f"redis_{name}_bytes_per_chunk": value / num_chunks
                    for name, value in zip(("kept", "read", "sent"), redis, strict=True)
                },
            }
        )

    def costs(self) -> dict[str, Any]:
        """The medians by tokens a chunk, and their ranges."""
        chunks = {}
        for num_tokens, rows in self._costs.items():
            values = {name: [row[name] for row in rows] for name in rows[0]}
            chunks[str(num_tokens)] = {
                "tokens_per_second_of_a_sample": self._load.tokens_per_second(num_tokens),
                "chunks_per_second": self._load.num_samples / self._load.period_s,
                **{name: statistics.median(found) for name, found in values.items()},
                "spread": {name: [min(found), max(found)] for name, found in values.items()},
            }
        return {"chunks": chunks}


async def _windows(
    run: EmulatedRun,
    broker: Served,
    chunk_tokens: Sequence[int],
    num_repetitions: int,
    idle_s: float,
    progress: Progress,
) -> _Windows:
    windows, url = _Windows(run.load), run.stage.redis_url
    for repetition in range(num_repetitions):
        for num_tokens in chunk_tokens:
            progress(f"fleet: chunks of {num_tokens} tokens, {repetition + 1} of {num_repetitions}")
            idle = await _heartbeats(run, broker, idle_s)
            windows.idle.append(idle)
            before = await meters.RedisCounts.read(url)
            phase = await run.stream(num_tokens)
            after = await meters.RedisCounts.read(url)
            windows.add(idle.phase, num_tokens, phase, after.since(before))
    return windows


def _us(phase: Phase, idle_share: float, count: int) -> float:
    """CPU time of the broker for each of `count` things, less that of heartbeats."""
    return 1e6 * max(0.0, phase.brokers_s - idle_share * phase.took_s) / count
