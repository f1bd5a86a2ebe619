"""Makes the first-fit plan: every role on a live machine that allows it.

One trainer, one reward worker and one broker on the strongest machines that allow the role (by total stated FLOP/s,
then by cores), and `num_generators` generators spread evenly, the strongest machines first; shares follow measured
rates if there are any. It states no expected throughput because it computes none.
"""

from __future__ import annotations

from collections import Counter

from penstock.errors import PenstockError
from penstock.v1 import scheduler_pb2 as pb

SOLVER = "first_fit"
_SINGLE_ROLES = (pb.ROLE_BROKER, pb.ROLE_TRAINER, pb.ROLE_REWARD)


class InfeasiblePlanError(PenstockError):
    """No machine can take a required role."""

    code, reason = 9, "INFEASIBLE"


def first_fit(views: list[pb.NodeView], *, run_id: str, num_generators: int) -> pb.Plan:
    """A plan for one run; `num_generators` 0 puts one generator on each machine that allows the role.

    Raises InfeasiblePlanError naming the role and what was offered.
    """
    alive = sorted((view for view in views if view.is_alive), key=_strength, reverse=True)
    plan = pb.Plan(run_id=run_id, solver=SOLVER)
    for role in _SINGLE_ROLES:
        view = _candidates(alive, role)[0]
        plan.assignments.add(node_id=view.node.node_id, role=role, share=1.0, num_replicas=1)
    candidates = _candidates(alive, pb.ROLE_GENERATOR)
    wanted = num_generators or len(candidates)
    replicas = Counter(candidates[index % len(candidates)].node.node_id for index in range(wanted))
    weights = {view.node.node_id: _rate(view) * replicas[view.node.node_id] for view in candidates}
    total = sum(weights.values())
    for node_id, count in replicas.items():
        plan.assignments.add(
            node_id=node_id, role=pb.ROLE_GENERATOR, num_replicas=count, share=weights[node_id] / total
        )
    plan.explanation = (
        f"first fit over {len(alive)} machines: {wanted} generators on {len(replicas)} machines, "
        "broker, trainer and reward on the strongest that may play the role"
    )
    return plan


def _candidates(alive: list[pb.NodeView], role: pb.Role.ValueType) -> list[pb.NodeView]:
    found = [view for view in alive if not view.node.roles or role in view.node.roles]
    if not found:
        name = pb.Role.Name(role).removeprefix("ROLE_").lower()
        raise InfeasiblePlanError(
            f"no machine can be the {name}: {len(alive)} machines are alive and none of them allows that role",
            role=name,
        )
    return found


def _strength(view: pb.NodeView) -> tuple[float, int]:
    flops = sum(each.count * each.flops_per_second for each in view.node.accelerators)
    return flops, view.node.num_cpu_cores


def _rate(view: pb.NodeView) -> float:
    return sum(rate.tokens_per_second for rate in view.rates if rate.role == pb.ROLE_GENERATOR) or 1.0
