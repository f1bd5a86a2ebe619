"""Exports to Prometheus what a process does for token shards."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class ShardMetrics:
    """The metrics of the token shards that a process works on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.commits = Counter("penstock_broker_shard_commits", "Commits to token shards", ["run"], registry=registry)
        self.conflicts = Counter(
            "penstock_broker_shard_commit_conflicts", "Of these, another broker was before", ["run"], registry=registry
        )
        self.mismatches = Counter(
            "penstock_broker_shard_mismatches",
            "Leases refused because run and shard have other numbers of tokens: the store lost some",
            ["run"],
            registry=registry,
        )
        self.shards = Gauge("penstock_broker_shards", "Token shards in memory", registry=registry)
