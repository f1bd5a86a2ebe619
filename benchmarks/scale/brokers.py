"""Measures several broker processes on one run: CPU a token, and commits that another broker was before."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command import Progress
from benchmarks.scale import meters
from benchmarks.scale.emulated_run import EmulatedRun, Load, Scene, emulated_run, start_served

SHARDS_PER_BROKER = 4
"""Token shards of a run with several brokers, for each of them; with one broker there are none, the default."""
OBSERVED_AFTER_S = 1.5
"""Brokers set the gauge of conflicts once a second."""


async def measure(
    scene: Scene,
    load: Load,
    *,
    numbers: Sequence[int],
    num_processes: int,
    num_tokens: int,
    num_repetitions: int,
    idle_s: float,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """The same load on each number of brokers, one run after the other; those after the first start when needed."""
    stage, brokers = scene.stage, [scene.broker]
    workers = [await stage.start_worker() for _ in range(num_processes)]
    found: dict[str, dict[str, float]] = {}
    for number in sorted(numbers):
        progress(f"brokers: {number} on one run")
        while len(brokers) < number:
            brokers.append(await start_served(stage))
        shards = replace(load, num_shards=SHARDS_PER_BROKER * number if number > 1 else 0)
        async with emulated_run(stage, brokers, workers, shards, run_id=f"brokers-{number}") as run:
            await run.lease()
            found[str(number)] = await _measure(run, num_tokens, num_repetitions, idle_s)
            await run.leave()
    return found


async def _measure(run: EmulatedRun, num_tokens: int, num_repetitions: int, idle_s: float) -> dict[str, float]:
    costs, idle_shares = [], []
    # Not measured: shards look up each lease at its first chunk, once in the life of a sample.
    await run.stream(num_tokens)
    before = await _counts(run)
    for _ in range(num_repetitions):
        idle, phase = await run.idle(idle_s), await run.stream(num_tokens)
        idle_shares.append(idle.brokers_share)
        beyond_s = (phase.brokers_share - idle.brokers_share) * phase.took_s
        costs.append(1e6 * beyond_s / phase.total("num_tokens"))
    after = await _counts(run)
    conflicts, commits = after[0] - before[0], after[1] - before[1]
    return {
        "us_per_token": statistics.median(costs),
        "us_per_token_least": min(costs),
        "us_per_token_most": max(costs),
        "conflict_ratio": conflicts / max(1, conflicts + commits),
        "num_commits": commits,
        "idle_core_percent": 100 * statistics.median(idle_shares),
        "num_shards": run.load.num_shards,
    }


async def _counts(run: EmulatedRun) -> tuple[float, int]:
    """Conflicts and commits so far, of the run's own document and of its token shards."""
    await asyncio.sleep(OBSERVED_AFTER_S)
    readings = [await meters.Metrics.read(broker.metrics_port) for broker in run.brokers]
    commits = await meters.num_commits(run.stage.redis_url, run.run_id, num_shards=run.load.num_shards)
    names = (meters.CONFLICTS, meters.SHARD_CONFLICTS)
    return sum(reading.total(name, run.run_id) for reading in readings for name in names), commits
