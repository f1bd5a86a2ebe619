"""Metrics for each of the seven invariants, named after it, so that an alert can be written for each.

`..._imbalance_samples` and `..._violations_samples` must stay 0; the other counters rise in a correct run too (a
retry is a recognised duplicate) and show how often an invariant was enforced.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.timestamps import unix_s
from services.broker.state.run_state import RunState

PREFIX = "penstock_invariant"
_TRAIN, _EVALUATE = types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVALUATE


class InvariantMetrics:
    """See the module; labels are the run, or the kind of item counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.of_runs: list[Gauge] = []

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            self.of_runs.append(Gauge(f"{PREFIX}_{name}", text, ["run", *labels], registry=registry))
            return self.of_runs[-1]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        self._imbalance = gauge(
            "conservation_imbalance_samples", "Samples submitted less trained, dropped and in flight: 0"
        )
        self._oldest = gauge("staleness_max_versions", "Largest staleness of a trained sample, in versions")
        self._bound = gauge("staleness_bound_versions", "The run's bound on it")
        self._too_old = gauge("staleness_violations_samples", "Samples trained beyond the bound: 0")
        self.duplicates = counter("exactly_once_duplicates", "Repetitions recognised and not counted again", "kind")
        """Kinds are prompt, chunk, score, step and put."""
        self.refused_tokens = counter(
            "no_token_twice_refused_tokens", "Tokens refused: known, or after a gap", "reason"
        )
        self.unattested = counter("attested_weights_refused_chunks", "Chunks of versions not reached yet")
        self._longest = gauge(
            "no_endless_wait_longest_seconds", "Longest time that any part of the run has been waiting, seconds"
        )
        self._fill = gauge("bounded_fill_ratio", "How full a queue is, 0 to 1", "queue")
        self.refusals = counter("bounded_refusals", "Items refused because a queue was full", "queue")
        """Queues are prompts and puts."""

    def observe(
        self, state: RunState, books: broker_pb2.Audit, waits: Sequence[broker_pb2.Wait], *, now_s: float
    ) -> None:
        """Set the gauges of a run."""
        run_id, bound = state.run.run_id, state.limits.max_staleness
        known = books.trained + sum(books.dropped.values()) + books.in_flight
        self._imbalance.labels(run_id).set(books.submitted - known)
        self._oldest.labels(run_id).set(books.max_staleness_seen)
        self._bound.labels(run_id).set(bound)
        too_old = sum(count for versions, count in books.trained_by_staleness.items() if versions > bound)
        self._too_old.labels(run_id).set(too_old)
        longest_s = max((now_s - unix_s(wait.since_time) for wait in waits), default=0.0)
        self._longest.labels(run_id).set(max(0.0, longest_s))
        limits = state.limits
        queues = {
            "training prompts": state.num_waiting(_TRAIN) / limits.max_queued_groups,
            "evaluation prompts": state.num_waiting(_EVALUATE) / limits.max_queued_groups,
            "step": books.in_flight_by_state.get("delivered", 0) / (limits.groups_per_step * limits.group_size),
        }
        for queue, ratio in queues.items():
            self._fill.labels(run_id, queue).set(min(1.0, ratio))
