"""Prometheus metrics of the plans in force, to be held against what is measured, and of the machines for them."""

from __future__ import annotations

from collections.abc import Iterable

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

MACHINE_IS_GONE = Gauge(
    "penstock_scheduler_machine_is_gone",
    "1 while a machine that did not leave has missed three reports",
    ["machine", "site"],
)


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


class MachineGauges:
    """The gauges of the machines in an inventory."""

    def __init__(self) -> None:
        self._present: set[tuple[str, str]] = set()

    def observe(self, views: Iterable[pb.NodeView]) -> None:
        """Set the gauge of every machine, and remove those of machines that left."""
        is_gone = {(view.node.node_id, view.node.site): not view.is_alive for view in views}
        for name in self._present - is_gone.keys():
            MACHINE_IS_GONE.remove(*name)
        for name, value in is_gone.items():
            MACHINE_IS_GONE.labels(*name).set(value)
        self._present = set(is_gone)
