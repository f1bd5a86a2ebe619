"""Prometheus metrics of a reward process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SCORES = Counter("penstock_reward_scores", "Samples scored, by reward model and outcome.", ["model", "status"])
PART_SCORES = Counter(
    "penstock_reward_part_scores",
    "Scores by the parts of a composite reward; of the status unanswered where the call failed.",
    ["part", "status"],
)
BATCH_SECONDS = Histogram(
    "penstock_reward_batch_seconds",
    "Time from taking a batch to having its scores, retries included, seconds.",
    ["model"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)
TEXTS = Counter(
    "penstock_reward_texts",
    "Samples by the text sent for them, against what their token ids say: same, differing, not_sent, unknown_token.",
    ["sent"],
)
RETRIES = Counter("penstock_reward_retries", "Calls of the reward model that failed and were tried again.", ["model"])
HELD_SAMPLES = Gauge("penstock_reward_held_samples", "Samples leased and not yet scored.", ["model"])
CANARIES = Counter("penstock_reward_canary_rounds", "Rounds of canaries: passed, drifted.", ["model", "outcome"])
IS_DRIFTED = Gauge(
    "penstock_reward_is_drifted", "1 while canaries are not scored as known and samples wait.", ["model"]
)
IS_HOLDING_BACK = Gauge(
    "penstock_reward_is_holding_back", "1 while the reward model does not answer and samples wait.", ["model"]
)
