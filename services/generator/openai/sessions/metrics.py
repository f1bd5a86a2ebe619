"""Defines the Prometheus metrics of the OpenAI-compatible endpoint."""

from __future__ import annotations

from collections import Counter as Tally
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from services.generator.openai.sessions.session_groups import SessionGroups

_PREFIX = "penstock_generator_openai"


class OpenAIMetrics:
    """Created once per process; tests pass their own registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter(f"{_PREFIX}_requests", "Requests answered, by path and status.", ["path", "status"])
        self.turns = counter(
            f"{_PREFIX}_turns", "Turns of sessions: continued exactly, restarted, or branched off.", ["kind"]
        )
        self.repeats = counter(f"{_PREFIX}_repeats", "Repeated requests answered with what was sampled before.")
        self.sessions = counter(f"{_PREFIX}_sessions", "Sessions ended: put, or why they were dropped.", ["outcome"])
        self.trajectories = counter(f"{_PREFIX}_trajectories", "Trajectories put.")
        self.branches = counter(f"{_PREFIX}_branches_dropped", "Branches of sessions left out, by reason.", ["reason"])
        self.records = counter(
            f"{_PREFIX}_session_records",
            "Sessions at the broker: stored, refused for room, failed, or taken of a generator that is gone.",
            ["outcome"],
        )
        self._open = gauge(f"{_PREFIX}_open_sessions", "Sessions that go on.")
        self._held = gauge(f"{_PREFIX}_held_sessions", "Sessions that go on or wait for their siblings.")
        self._seen: Tally[str] = Tally()

    def end_sessions(self, outcome: str, num_sessions: int) -> None:
        """Count sessions that were put, or why they are not trained on."""
        if num_sessions:
            self.sessions.labels(outcome).inc(num_sessions)

    def drop_branches(self, reason: str, num_branches: int) -> None:
        """Count branches that are left out of their group."""
        if num_branches:
            self.branches.labels(reason).inc(num_branches)

    def follow(self, groups: SessionGroups) -> None:
        """Copy the counts of the groups."""
        for reason, number in (groups.dropped - self._seen).items():
            self.end_sessions(reason, number)
        self._seen = groups.dropped.copy()
        self._open.set(groups.num_open)
        self._held.set(groups.num_held)
