"""Prometheus metrics of judges."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

REQUESTS = Counter(
    "penstock_reward_judge_requests",
    "Requests to a judge, by outcome: answered, refused, unreachable, timed_out, or cached ones not sent.",
    ["judge", "outcome"],
)
VOTES = Counter("penstock_reward_judge_votes", "Votes of a judge: usable or not.", ["judge", "outcome"])
TOKENS = Counter(
    "penstock_reward_judge_tokens", "Tokens that a judge's endpoint counted: prompt, completion.", ["judge", "kind"]
)
COST = Counter("penstock_reward_judge_cost", "Their price, in the currency of reward.judge.prompt_price.", ["judge"])
REQUEST_SECONDS = Histogram(
    "penstock_reward_judge_request_seconds",
    "Time of a judge's answers, seconds.",
    ["judge"],
    buckets=(0.05, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
