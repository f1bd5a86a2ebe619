"""A generator's Prometheus metrics."""

from __future__ import annotations

from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_PAUSE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class GeneratorMetrics:
    """Made once per process; tests pass a registry of their own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.tokens = counter("penstock_generator_tokens", "Completion tokens decoded.")
        self.samples = counter("penstock_generator_samples", "Samples ended, by outcome.", ["outcome"])
        self.refused_chunks = counter(
            "penstock_generator_refused_chunks", "Chunks of tokens that a broker refused.", ["reason"]
        )
        self.running = gauge("penstock_generator_running_samples", "Samples being decoded.")
        self.environment_waiting = gauge(
            "penstock_generator_environment_waiting_samples",
            "Samples that wait for an environment, in no slot.",
        )
        self.environment_sessions = counter(
            "penstock_generator_environment_sessions",
            "Sessions with an environment that ended, by the status of the score.",
            ["status"],
        )
        self.environment_wait_s = counter(
            "penstock_generator_environment_wait_seconds", "Time for which sessions that ended were in no slot."
        )
        self.policy_version = gauge("penstock_generator_policy_version", "Version the engine holds, digest checked.")
        self.engine_failures = counter(
            "penstock_generator_engine_failures",
            "Ends of this generator's processes: failed (engine died, out of memory, raised), hung or killed.",
            ["how"],
        )
        self.swaps = counter("penstock_generator_weight_swaps", "Weight versions installed.")
        self.swap_pause_s = Histogram(
            "penstock_generator_swap_pause_seconds",
            "How long a swap kept decoding still.",
            buckets=_PAUSE_BUCKETS_S,
            registry=registry,
        )
        self.recomputed_tokens = counter(
            "penstock_generator_recomputed_tokens", "Tokens whose KV was computed again under new weights."
        )
        self.weights_refused = counter(
            "penstock_generator_weights_refused", "Weights refused because a digest did not match."
        )
        self.weight_fetches = counter(
            "penstock_generator_weight_fetches", "Weight versions brought here, by way.", ["way"]
        )
        self.delta_fallbacks = counter(
            "penstock_generator_delta_fallbacks", "Weight versions fetched whole after their deltas could not be used."
        )
        self.delta_wait_s = counter(
            "penstock_generator_delta_wait_seconds", "Time in which deltas that were still being made were waited for."
        )
        self.fetched_bytes = counter(
            "penstock_generator_fetched_bytes",
            "Bytes of weights that came, from the origin, a relay of the same site or a broadcast.",
            ["source"],
        )
        self.broadcasts = counter(
            "penstock_generator_broadcasts", "Broadcasts of weights taken part in, by outcome.", ["outcome"]
        )
        self.relayed_bytes = counter(
            "penstock_generator_relayed_bytes", "Bytes of weights sent to generators of the same site."
        )
