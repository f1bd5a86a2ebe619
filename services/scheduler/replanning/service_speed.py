"""Follows how fast a run's scorers and critic are, from their measurements. Pure.

Each says how many tokens per second it computes while it computes. The median of those on GPUs of a type replaces the
rate that the cost model expects of that type, which it derives from matrix products alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import MeasuredRate, NodeClass, Problem

CHANGED_BY = 0.1
"""By how much a rate must change to be planned for again."""
_LEAST_COMPUTE_SHARE = 0.1
"""Of a critic's measured step: the rest may be the exchange that the cost model expects, which then is too slow."""


class Kind(NamedTuple):
    """What was measured: a service on GPUs of a type."""

    role: Literal["scorer", "critic"]
    gpu: str


def service_rates(
    problem: Problem,
    plan: PlanDocument,
    views: Sequence[pb.NodeView],
    *,
    run_id: str,
    before: Mapping[Kind, float],
    slow: Mapping[str, float],
) -> dict[Kind, float]:
    """Tokens per second that one GPU computes, where it was measured and is not what the cost model expects.

    A critic beside a trainer is left out: how long its GPUs were the trainer's meanwhile is not known.

    Args:
        problem: The problem as stated, with current lengths.
        plan: The plan in force.
        views: The inventory.
        run_id: The run.
        before: The previous result, whose rates stay unless they changed by CHANGED_BY.
        slow: Machines that are planned for as slower ones, and their share of the speed of others.
    """
    if not plan.score and plan.critic is None:
        return {}
    model = CostModel(problem)
    measured: dict[Kind, list[float]] = defaultdict(list)
    expected: dict[Kind, float] = {}
    for name, node, rate in _measured(problem, views, run_id):
        one: tuple[Kind, float, float] | None = None
        if rate.role == pb.ROLE_SCORER and plan.score:
            tokens = model.gpu_scoring_rate[node.name] * model.demand.trained_tokens
            one = Kind("scorer", node.gpu), rate.tokens_per_second, tokens
        elif rate.role == pb.ROLE_CRITIC and plan.critic is not None and plan.critic.node == name:
            one = _of_critic(model, plan, node, rate.tokens_per_second)
        if one is not None and one[2] > 0:
            measured[one[0]].append(one[1] / slow.get(name, 1.0))
            expected[one[0]] = one[2]
    found = dict(before)
    for kind, rates in measured.items():
        now = median(rates)
        if abs(now / found.get(kind, expected[kind]) - 1) > CHANGED_BY:
            found[kind] = float(f"{now:.2g}")
    return found


def with_service_rates(problem: Problem, rates: Mapping[Kind, float]) -> Problem:
    """The problem with these rates."""
    if not rates:
        return problem
    kept = [rate for rate in problem.measured_rates if (rate.role, rate.gpu) not in rates]
    found = [MeasuredRate(gpu=kind.gpu, role=kind.role, tokens_per_second=rate) for kind, rate in sorted(rates.items())]
    return problem.model_copy(update={"measured_rates": (*kept, *found)})


def in_words(rates: Mapping[Kind, float]) -> str:
    """A sentence for each service, with a space behind it."""
    words = ""
    for role, what in (("scorer", "A scorer"), ("critic", "A GPU of the critic")):
        each = [f"{rate:g} tokens/s on {kind.gpu}" for kind, rate in sorted(rates.items()) if kind.role == role]
        words += f"{what} computes {', '.join(each)}. " if each else ""
    return words


def _measured(
    problem: Problem, views: Sequence[pb.NodeView], run_id: str
) -> Iterator[tuple[str, NodeClass, pb.MeasuredRate]]:
    """Rates of the run with their machines, of a type that the problem has machines of."""
    nodes = node_classes(problem)
    of_type = {node.gpu: node for node in problem.nodes}
    for view in views:
        kinds = [each.kind for each in view.node.accelerators]
        node = nodes.get(view.node.node_id) or (of_type.get(kinds[0]) if len(kinds) == 1 else None)
        if view.is_alive and node is not None:
            for rate in view.rates:
                if rate.run_id == run_id and rate.tokens_per_second > 0:
                    yield view.node.node_id, node, rate


def _of_critic(
    model: CostModel, plan: PlanDocument, node: NodeClass, tokens_per_second: float
) -> tuple[Kind, float, float] | None:
    """Rate of each of the critic's GPUs without their exchange, and what is expected of it."""
    place = plan.critic
    if place is None or place.is_beside_trainer or not model.critic.has_tasks:
        return None
    expected_s, compute_s = model.critic.step_s(node, place.gpus), model.critic.compute_s(node, place.gpus)
    tokens = model.demand.samples_per_step * model.demand.trained_tokens
    step_s = tokens / tokens_per_second
    measured_s = max(_LEAST_COMPUTE_SHARE * step_s, step_s - (expected_s - compute_s))
    return Kind("critic", node.gpu), tokens / measured_s / place.gpus, tokens / compute_s / place.gpus
