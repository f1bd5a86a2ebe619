"""Exports the broker's metrics to Prometheus. Events raise counters; the caretaker sets gauges periodically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PrometheusCounter

from penstock.v1 import broker_pb2
from services.broker.runtime.invariant_metrics import InvariantMetrics
from services.broker.state.counters import DROPPED, TRAINED, Entry
from services.broker.state.run_audit import totals
from services.broker.state.run_state import RunState

_GAPS_S = (1.0, 2.05, 2.1, 2.2, 2.5, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0)


class BrokerMetrics:
    """The broker's metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._of_runs: list[Gauge] = []

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            self._of_runs.append(Gauge(name, text, ["run", *labels], registry=registry))
            return self._of_runs[-1]

        def counter(name: str, text: str, *labels: str) -> PrometheusCounter:
            return PrometheusCounter(name, text, labels, registry=registry)

        self.registry = registry
        self.invariants = InvariantMetrics(registry)
        self.leases = counter("penstock_broker_leases", "Leases given", "kind")
        """Kinds are generation and scoring."""
        self.expired = counter("penstock_broker_leases_expired", "Leases expired", "kind")
        self.forecasts = counter("penstock_broker_forecasts", "Questions for length forecasts, by outcome", "outcome")
        """Requests to the scheduler: answered, failed or skipped."""
        self.length_reports = counter(
            "penstock_broker_length_reports", "Completion lengths for the scheduler", "outcome"
        )
        """Reported, refused, or forgotten because the scheduler was unavailable for long."""
        self.moves = counter("penstock_broker_leases_moved", "Leases moved to an idle generator")
        self.tokens = counter("penstock_broker_tokens_accepted", "Completion tokens stored")
        self.refused = counter("penstock_broker_chunks_refused", "Token chunks refused", "reason")
        self.misdirected = counter(
            "penstock_broker_requests_misdirected", "Token requests to a broker that owns none of their shards"
        )
        self._dropped = gauge(
            "penstock_broker_samples_dropped",
            "Training samples given up, by length bucket in tokens",
            "reason",
            "max_tokens",
        )
        self._lengths = gauge(
            "penstock_broker_samples_trained_by_length",
            "Training samples trained, by length bucket in tokens",
            "max_tokens",
        )
        self._trained = gauge("penstock_broker_samples_trained", "Training samples by staleness", "staleness_versions")
        self._samples = gauge("penstock_broker_samples_in_flight", "Training samples by state", "state")
        self._version = gauge("penstock_broker_policy_version", "The run's policy version")
        self._queued = gauge("penstock_broker_groups_queued", "Groups with samples to lease")
        self._stored_bytes = gauge(
            "penstock_broker_stored_bytes", "What the run has in the store, half of max_retained_bytes for each", "kind"
        )
        """Kinds are live and trained."""
        self._conflicts = gauge("penstock_broker_commit_conflicts", "Commits another broker was before")
        self._of_the_process(registry)

    def _of_the_process(self, registry: CollectorRegistry) -> None:
        """The metrics of the process itself: its event loop, load and heartbeats."""
        self.loop_stalls = Histogram(
            "penstock_broker_loop_stall_seconds",
            "Event loop held, sampled ten times a second",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0),
            registry=registry,
        )
        self.longest_loop_stall = Gauge(
            "penstock_broker_loop_longest_stall_seconds", "Longest time the event loop was held", registry=registry
        )
        self.load = Gauge("penstock_broker_load_ratio", "Load that both intervals follow, 0 to 1", registry=registry)
        self.is_behind = Gauge(
            "penstock_broker_is_behind",
            "1 while it is short of a core, and leases wait for it",
            registry=registry,
        )
        self.flush_interval = Gauge(
            "penstock_broker_flush_interval_seconds",
            "Flush interval asked of generators, 0 for their own",
            registry=registry,
        )
        self.heartbeat_interval = Gauge(
            "penstock_broker_heartbeat_interval_seconds",
            "Heartbeat interval asked of generators with long leases, 0 for their own",
            registry=registry,
        )
        self._heartbeat_gaps = Histogram(
            "penstock_broker_heartbeat_gap_seconds",
            "Time between heartbeats, as read",
            buckets=_GAPS_S,
            registry=registry,
        )
        self._longest_heartbeat_gap = Gauge(
            "penstock_broker_heartbeat_longest_gap_seconds", "Longest of those times", registry=registry
        )
        self._longest_heartbeat_delay = Gauge(
            "penstock_broker_heartbeat_longest_delay_seconds",
            "Longest time by which one exceeded the interval that the generator was to keep",
            registry=registry,
        )
        self._longest_heartbeat_gap_s = self._longest_heartbeat_delay_s = 0.0

    def note_heartbeat_gap(self, gap_s: float, interval_s: float) -> None:
        """Count the time since a generator's last heartbeat; it was to send one at least every `interval_s`."""
        self._heartbeat_gaps.observe(gap_s)
        if gap_s > self._longest_heartbeat_gap_s:
            self._longest_heartbeat_gap_s = gap_s
            self._longest_heartbeat_gap.set(gap_s)
        if gap_s - interval_s > self._longest_heartbeat_delay_s:
            self._longest_heartbeat_delay_s = gap_s - interval_s
            self._longest_heartbeat_delay.set(gap_s - interval_s)

    def observe(
        self, state: RunState, *, num_conflicts: int, waits: Sequence[broker_pb2.Wait] = (), now_s: float = 0.0
    ) -> None:
        """Set the gauges of a run."""
        run_id, books = state.run.run_id, totals(state)
        self.invariants.observe(state, books, waits, now_s=now_s)
        for versions, count in books.trained_by_staleness.items():
            self._trained.labels(run_id, str(versions)).set(count)
        for name in ("queued", "leased", "sealing", "finished", "scoring", "scored", "delivered"):
            self._samples.labels(run_id, name).set(books.in_flight_by_state.get(name, 0))
        self._version.labels(run_id).set(state.run.policy_version)
        self._queued.labels(run_id).set(len(state.queue))
        self._stored_bytes.labels(run_id, "live").set(state.index.live_bytes)
        self._stored_bytes.labels(run_id, "trained").set(state.index.retained_bytes.total())
        self.observe_conflicts(run_id, num_conflicts)

    def observe_conflicts(self, run_id: str, num_conflicts: int) -> None:
        """Set how often another broker was first, which outlives the copy of a run."""
        self._conflicts.labels(run_id).set(num_conflicts)

    def forget(self, run_id: str) -> None:
        """Remove the gauges of a run that the process does not work on any more."""
        for gauge in (*self._of_runs, *self.invariants.of_runs):
            gauge.remove_by_labels({"run": run_id})

    def observe_books(self, run_id: str, counts: Mapping[str, int]) -> None:
        """Set the gauges of a run that follow its audit counters."""
        trained: Counter[int] = Counter()
        dropped: Counter[tuple[str, int]] = Counter()
        for name, count in counts.items():
            entry = Entry.parse(name)
            if entry.kind == TRAINED:
                trained[entry.max_tokens] += count
            elif entry.kind == DROPPED:
                dropped[(entry.reason, entry.max_tokens)] += count
        for max_tokens, count in trained.items():
            self._lengths.labels(run_id, str(max_tokens)).set(count)
        for (reason, max_tokens), count in dropped.items():
            self._dropped.labels(run_id, reason, str(max_tokens)).set(count)
