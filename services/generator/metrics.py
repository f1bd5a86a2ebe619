"""A generator's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_PAUSE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class GeneratorMetrics:
    """Made once per process; tests pass a registry of their own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.tokens = Counter("penstock_generator_tokens", "Completion tokens decoded.", registry=registry)
        self.samples = Counter(
            "penstock_generator_samples", "Samples ended, by outcome.", ["outcome"], registry=registry
        )
        self.running = Gauge("penstock_generator_running_samples", "Samples being decoded.", registry=registry)
        self.policy_version = Gauge(
            "penstock_generator_policy_version", "Version the engine holds, digest checked.", registry=registry
        )
        self.engine_failures = Counter(
            "penstock_generator_engine_failures",
            "Ends of this generator's processes: failed (engine died, out of memory, raised), hung or killed.",
            ["how"],
            registry=registry,
        )
        self.swaps = Counter("penstock_generator_weight_swaps", "Weight versions installed.", registry=registry)
        self.swap_pause_s = Histogram(
            "penstock_generator_swap_pause_seconds",
            "How long a swap kept decoding still.",
            buckets=_PAUSE_BUCKETS_S,
            registry=registry,
        )
        self.recomputed_tokens = Counter(
            "penstock_generator_recomputed_tokens",
            "Tokens whose KV was computed again under new weights.",
            registry=registry,
        )
        self.weights_refused = Counter(
            "penstock_generator_weights_refused", "Weights refused because a digest did not match.", registry=registry
        )
        self.weight_fetches = Counter(
            "penstock_generator_weight_fetches", "Weight versions brought here, by way.", ["way"], registry=registry
        )
        self.delta_fallbacks = Counter(
            "penstock_generator_delta_fallbacks",
            "Weight versions fetched whole after their deltas could not be used.",
            registry=registry,
        )
        self.fetched_bytes = Counter(
            "penstock_generator_fetched_bytes",
            "Bytes of weights that came, from the origin, a relay of the same site or a broadcast.",
            ["source"],
            registry=registry,
        )
        self.broadcasts = Counter(
            "penstock_generator_broadcasts",
            "Broadcasts of weights taken part in, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.relayed_bytes = Counter(
            "penstock_generator_relayed_bytes",
            "Bytes of weights sent to generators of the same site.",
            registry=registry,
        )
