"""Prometheus metrics of a scorer process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SAMPLES = Counter("penstock_scorer_samples", "Samples by outcome: ok, failed.", ["outcome"])
TOKENS = Counter("penstock_scorer_tokens", "Tokens that went through the model, prompts included.")
BATCH_SECONDS = Histogram(
    "penstock_scorer_batch_seconds",
    "Time from taking leases to having their log-probs, seconds.",
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)
HELD_SAMPLES = Gauge("penstock_scorer_held_samples", "Samples leased and not yet answered.")
