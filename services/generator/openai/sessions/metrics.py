"""Defines the Prometheus metrics of the OpenAI-compatible endpoint."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from services.generator.openai.sessions.session_groups import SessionGroups

_PREFIX = "penstock_generator_openai"


class OpenAIMetrics:
    """Created once per process; tests pass their own registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.requests = Counter(
            f"{_PREFIX}_requests", "Requests answered, by path and status.", ["path", "status"], registry=registry
        )
        self.turns = Counter(
            f"{_PREFIX}_turns",
            "Turns of sessions: continued exactly, begun anew, or branched off.",
            ["kind"],
            registry=registry,
        )
        self.repeats = Counter(
            f"{_PREFIX}_repeats", "Repeated requests answered with what was sampled before.", registry=registry
        )
        self._sessions = Counter(
            f"{_PREFIX}_sessions", "Sessions ended: put, or why they were dropped.", ["outcome"], registry=registry
        )
        self._trajectories = Counter(f"{_PREFIX}_trajectories", "Trajectories put.", registry=registry)
        self._branches = Counter(
            f"{_PREFIX}_branches_dropped", "Branches of sessions left out, by reason.", ["reason"], registry=registry
        )
        self._open = Gauge(f"{_PREFIX}_open_sessions", "Sessions that go on.", registry=registry)
        self._held = Gauge(
            f"{_PREFIX}_held_sessions", "Sessions that go on or wait for their siblings.", registry=registry
        )
        self._seen: Tally[str] = Tally()
        self.outcomes: Tally[str] = Tally()
        """Sessions ended, by outcome."""
        self.dropped_branches: Tally[str] = Tally()
        """Branches left out, by reason."""

    def put(self, *, num_sessions: int, num_trajectories: int) -> None:
        """Count a stored group."""
        self._end_sessions("put", num_sessions)
        self._trajectories.inc(num_trajectories)

    def drop_sessions(self, reason: str, num_sessions: int) -> None:
        """Count sessions with a reward that are not trained on."""
        self._end_sessions(reason, num_sessions)

    def drop_branches(self, reason: str, num_branches: int) -> None:
        """Count branches that are left out of their group."""
        if num_branches:
            self._branches.labels(reason).inc(num_branches)
            self.dropped_branches[reason] += num_branches

    def follow(self, groups: SessionGroups) -> None:
        """Copy the counts of the groups."""
        for reason, number in groups.dropped.items():
            self._end_sessions(reason, number - self._seen[reason])
            self._seen[reason] = number
        self._open.set(groups.num_open)
        self._held.set(groups.num_held)

    def _end_sessions(self, outcome: str, number: int) -> None:
        if number:
            self._sessions.labels(outcome).inc(number)
            self.outcomes[outcome] += number
