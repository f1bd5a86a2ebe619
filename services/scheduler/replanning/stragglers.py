"""Which machines generate slower than they should, by what they measured. Pure.

A machine's speed is the time between tokens that the cost model expects of its replicas, over the one that it
measured: 1 is as fast as expected, whatever it has to do. It is held against machines with the same GPUs; where there
are too few, against all that measured, but never against more than the cost model expects. Machines that report only
tokens per second are compared with others of as many GPUs, for that says as much of what there is to do as of speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.replica import ReplicaModel, tensor_parallel_degrees
from services.scheduler.problem.problem import NodeClass, Problem

NUM_ALIKE = 3
"""This many measurements have a median that one bad machine does not move."""
SLOW_BELOW = 0.7
"""Of the median of machines alike: below, a machine is planned for as a slower one."""
FEW_SLOW_BELOW = 0.5
"""The same where fewer are alike. The cost model's decoding is up to 1.65 times too fast (docs/planning.md): a machine
that reaches 0.6 of it may be as fast as it can be."""
RECOVERED_BY = 0.1
"""How far above the limit a slow machine must be to count as recovered."""
CHANGED_BY = 0.15
"""By how much a slow machine's share must change to be planned for again."""


def slow_machines(
    problem: Problem, nodes: Mapping[str, NodeClass], views: Sequence[pb.NodeView], *, before: Mapping[str, float]
) -> dict[str, float]:
    """Machines far slower than they should be, with their share of that speed in tenths, 0.1 to 0.9.

    Args:
        problem: With the lengths that there are now.
        nodes: The machines that are there, by name.
        views: The inventory.
        before: What this said the last time.
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
    """Expected over measured time between tokens; None where there is nothing to expect it from."""
    if not rate.HasField("token_s"):
        return None
    demand = demand_of(problem)
    degree = max(1, rate.tensor_parallel)
    if degree not in tensor_parallel_degrees(problem, demand, node):
        return None
    return ReplicaModel(problem, demand, node, degree).token_s(rate.num_concurrent_samples) / rate.token_s
