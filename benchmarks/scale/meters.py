"""Reads what processes say of themselves: the brokers' metrics, Redis' own counts."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import redis.asyncio
from prometheus_client.parser import text_string_to_metric_families

from services.broker.records.shard_ids import shard_id
from services.broker.storage.redis.keys import RunKeys

STALLS = "penstock_broker_loop_stall_seconds"
LONGEST_STALL = "penstock_broker_loop_longest_stall_seconds"
GAPS = "penstock_broker_heartbeat_gap_seconds"
LONGEST_DELAY = "penstock_broker_heartbeat_longest_delay_seconds"
CONFLICTS = "penstock_broker_commit_conflicts"
SHARD_CONFLICTS = "penstock_broker_shard_commit_conflicts_total"
READ_TIMEOUT_S = 30.0
_Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading of a broker's metrics."""

    values: dict[str, dict[_Labels, float]]
    """By name and labels."""

    @classmethod
    async def read(cls, port: int) -> Metrics:
        """Read those that a process serves on this port."""
        text = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        values: dict[str, dict[_Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return cls(values)

    def total(self, name: str, run_id: str = "") -> float:
        """The sum over all labels, or over those of a run; 0 if there are none."""
        found = self.values.get(name, {}).items()
        return sum(value for labels, value in found if not run_id or dict(labels).get("run") == run_id)

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound."""
        found = self.values.get(f"{name}_bucket", {})
        return {float(dict(labels)["le"]): count for labels, count in found.items()}


def quantile(before: Sequence[Metrics], after: Sequence[Metrics], name: str, share: float) -> float:
    """The quantile of a histogram between two readings of several processes, interpolated within its bucket.

    0 if nothing was observed in between; the largest finite bound if it lies beyond that.
    """
    counts: dict[float, float] = {}
    for sign, readings in ((-1.0, before), (1.0, after)):
        for reading in readings:
            for bound, count in reading.buckets(name).items():
                counts[bound] = counts.get(bound, 0.0) + sign * count
    bounds = sorted(counts)
    wanted = share * counts[bounds[-1]] if bounds else 0.0
    if not wanted:
        return 0.0
    for lower, upper in pairwise([0.0, *bounds]):
        below = counts.get(lower, 0.0)
        if counts[upper] >= wanted:
            inside = (wanted - below) / (counts[upper] - below)
            return lower if upper == float("inf") else lower + inside * (upper - lower)
    return bounds[-1]


@dataclass(frozen=True, slots=True)
class RedisCounts:
    """What Redis holds, and what went through its connections so far."""

    dataset_bytes: int
    input_bytes: int
    output_bytes: int

    @classmethod
    async def read(cls, url: str) -> RedisCounts:
        """Read them."""
        client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url)
        try:
            info: dict[str, Any] = await client.info("all")
        finally:
            await client.aclose()
        return cls(
            dataset_bytes=int(info["used_memory_dataset"]),
            input_bytes=int(info["total_net_input_bytes"]),
            output_bytes=int(info["total_net_output_bytes"]),
        )

    def since(self, before: RedisCounts) -> tuple[float, float, float]:
        """Bytes more held, read and sent."""
        return (
            float(self.dataset_bytes - before.dataset_bytes),
            float(self.input_bytes - before.input_bytes),
            float(self.output_bytes - before.output_bytes),
        )


async def num_commits(url: str, run_id: str, *, num_shards: int) -> int:
    """Commits of a run so far: of its own document and of its token shards."""
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url)
    documents = [shard_id(run_id, shard) for shard in range(num_shards + 1)]
    try:
        revisions = [await client.hget(RunKeys(name).run, "revision") for name in documents]
    finally:
        await client.aclose()
    return sum(int(revision or 0) for revision in revisions)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=READ_TIMEOUT_S) as answer:
        return str(answer.read().decode())
