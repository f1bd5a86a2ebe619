"""Finds machines that generate more slowly than they should, from their measurements. Pure.

A machine's speed is the time between tokens that the cost model expects of its replicas, over the measured one: 1 is as
fast as expected, whatever its load. It is compared with machines with the same GPUs; if there are too few, with all
that measured, but never with more than the cost model expects. Machines that report only tokens per second are compared
with others of as many GPUs, since that rate depends on load as much as on speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.layouts import layouts
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.problem.plan_document import Layout
from services.scheduler.problem.problem import NodeClass, Problem

NUM_ALIKE = 3
"""The median of this many measurements is not moved by one bad machine."""
SLOW_BELOW = 0.7
"""Share of the median of similar machines below which a machine is planned as a slower one."""
FEW_SLOW_BELOW = 0.5
"""The same limit with fewer similar machines. The cost model's decoding is up to 1.65 times too fast
(docs/planning.md): a machine that reaches 0.6 of it may be at its maximum speed."""
RECOVERED_BY = 0.1
"""How far above the limit a slow machine must be to count as recovered."""
CHANGED_BY = 0.15
"""By how much a slow machine's share must change to be planned for again."""


def slow_machines(
    problem: Problem, nodes: Mapping[str, NodeClass], views: Sequence[pb.NodeView], *, before: Mapping[str, float]
) -> dict[str, float]:
    """Machines far slower than they should be, with their share of the expected speed in tenths, 0.1 to 0.9.

    Args:
        problem: The problem with current lengths.
        nodes: The machines present, by name.
        views: The inventory.
        before: The previous result.
    """
    there = [view for view in views if view.is_alive and view.node.node_id in nodes]
    modelled: dict[str, float] = {}
    reported: dict[str, float] = {}
    for view in there:
        name = view.node.node_id
        rates = [rate for rate in view.rates if rate.role == pb.ROLE_GENERATOR]
        speeds = [speed for rate in rates if (speed := _speed(problem, nodes[name], rate)) is not None]
        if speeds:
            modelled[name] = median(speeds)
        elif (tokens := sum(rate.tokens_per_second for rate in rates)) > 0:
            reported[name] = tokens
    usual = min(1.0, median(modelled.values())) if len(modelled) >= NUM_ALIKE else 1.0
    found: dict[str, float] = {}
    for name, speed in modelled.items():
        alike = [modelled[other] for other in modelled if nodes[other].gpu == nodes[name].gpu]
        is_enough = len(alike) >= NUM_ALIKE
        share = speed / (median(alike) if is_enough else usual)
        found |= _judged(name, share, SLOW_BELOW if is_enough else FEW_SLOW_BELOW, before.get(name))
    for name, tokens in reported.items():
        kind = (nodes[name].gpu, nodes[name].gpus)
        alike = [reported[other] for other in reported if (nodes[other].gpu, nodes[other].gpus) == kind]
        if len(alike) >= NUM_ALIKE:
            found |= _judged(name, tokens / median(alike), SLOW_BELOW, before.get(name))
    return found


def _judged(name: str, share: float, limit: float, before: float | None) -> dict[str, float]:
    if share >= (limit if before is None else limit + RECOVERED_BY):
        return {}
    if before is not None and abs(share - before) < CHANGED_BY:
        return {name: before}
    return {name: min(0.9, max(0.1, round(share, 1)))}


def _speed(problem: Problem, node: NodeClass, rate: pb.MeasuredRate) -> float | None:
    """Expected over measured time between tokens; None if nothing can be expected."""
    if not rate.HasField("token_s"):
        return None
    demand = demand_of(problem)
    layout = Layout(max(1, rate.tensor_parallel), max(1, rate.pipeline_parallel))
    if layout not in layouts(problem, demand, node):
        return None
    return ReplicaModel(problem, demand, node, *layout).token_s(rate.num_concurrent_samples) / rate.token_s
