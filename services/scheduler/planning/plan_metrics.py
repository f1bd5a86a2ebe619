"""Prometheus metrics of the plans in force: what they expect, to be held against what is measured."""

from __future__ import annotations

from prometheus_client import Gauge

from penstock.v1 import scheduler_pb2 as pb

EXPECTED_TOKENS = Gauge(
    "penstock_scheduler_plan_tokens_per_second", "Completion tokens a second that the plan in force expects", ["run"]
)
COST = Gauge(
    "penstock_scheduler_plan_cost_per_million_tokens",
    "US dollars a million completion tokens, as the plan in force expects",
    ["run"],
)
REVISION = Gauge("penstock_scheduler_plan_revision", "Revision of the plan in force", ["run"])


def observe(plan: pb.Plan) -> None:
    """Set the gauges of a plan's run."""
    REVISION.labels(plan.run_id).set(plan.revision)
    if plan.HasField("expected_tokens_per_second"):
        EXPECTED_TOKENS.labels(plan.run_id).set(plan.expected_tokens_per_second)
    if plan.HasField("cost_per_million_tokens"):
        COST.labels(plan.run_id).set(plan.cost_per_million_tokens)


def forget(run_id: str) -> None:
    """Remove the gauges of a run."""
    for gauge in (EXPECTED_TOKENS, COST, REVISION):
        gauge.remove_by_labels({"run": run_id})
