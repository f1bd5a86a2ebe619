"""Derives the current problem: machines that joined, left or slowed, and lengths that changed. Pure.

A machine of the problem counts as present for a limited time until it first registers; from then on its heartbeats
decide. A machine that the problem does not name is added if the problem describes its type of accelerator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.problem.output_lengths import scaled
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import MAX_GPUS, GpuType, MeasuredRate, NodeClass, Problem
from services.scheduler.replanning.migration import stands_still_s
from services.scheduler.replanning.stragglers import slow_machines

LENGTHS_CHANGED_BY = 0.1
_NO_TOKENS_PER_SECOND = 1e-3
"""Trained by a GPU that should not train: a pool with it is never worth its place."""


@dataclass(frozen=True, slots=True)
class Live:
    """A problem over the present machines, and their real names."""

    problem: Problem | None
    """None if no machine is left."""
    node_ids: Mapping[str, str]
    """Real names by the problem's machine id; a machine that is not listed has its id as name."""
    missing: frozenset[str] = frozenset()
    """Machines of the problem that never registered."""
    migration_s: float = 0.0
    """How long a generator that changes is idle."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Machines planned as slower ones: their share of the speed that they should have."""

    def to_real(self, plan: pb.Plan) -> None:
        """Rename machines of a plan over this problem to their real names."""
        for assignment in plan.assignments:
            assignment.node_id = self.node_ids.get(assignment.node_id, assignment.node_id)
        for relay in plan.weight_relays:
            relay.node_id = self.node_ids.get(relay.node_id, relay.node_id)

    def from_real(self, plan: PlanDocument) -> PlanDocument:
        """A plan over real machines in the problem's names, without the machines that are gone.

        Nor has it what is not planned again: relays follow from the rest, broker and scheduler stay.
        """
        back = {real: name for name, real in self.node_ids.items()}
        gen = [each.model_copy(update={"node": back[each.node]}) for each in plan.gen if each.node in back]
        train = [each.model_copy(update={"node": back[each.node]}) for each in plan.train if each.node in back]
        # Where some are gone, all are placed again: as many as keep up.
        score, reward_gpus = (
            tuple(each.model_copy(update={"node": back[each.node]}) for each in placed)
            if all(each.node in back for each in placed)
            else ()
            for placed in (plan.score, plan.reward_gpus)
        )
        critic = plan.critic
        if critic is not None:
            # One that cannot move goes on with the disk of its machine only, so it never passes for another one.
            critic = critic.model_copy(update={"node": back.get(critic.node, f"{critic.node} (gone)")})
        # Trainers of which some are gone are no mesh any more.
        return PlanDocument(
            gen=tuple(gen),
            train=tuple(train),
            mesh=plan.mesh if len(train) == len(plan.train) else None,
            score=score,
            reward=tuple(back.get(name, name) for name in plan.reward),
            critic=critic,
            reward_gpus=reward_gpus,
        )


def never_came(planned: Problem, in_force: PlanDocument, views: Sequence[pb.NodeView]) -> frozenset[str]:
    """Machines of the problem that have not registered, except those that train: trainers do not register."""
    known = {view.node.node_id for view in views} | {share.node for share in in_force.train}
    return frozenset(node_classes(planned)) - known


def machines_of(plan: PlanDocument) -> frozenset[str]:
    """All machines that have a part in it."""
    return frozenset(node for _, node, _ in plan.places())


def live_problem(
    planned: Problem,
    views: Sequence[pb.NodeView],
    *,
    left: frozenset[str],
    missing: frozenset[str],
    growth: float = 1.0,
    slow_before: Mapping[str, float] | None = None,
    untrained: frozenset[str] = frozenset(),
) -> Live:
    """The current problem.

    Args:
        planned: The problem as stated.
        views: The inventory.
        left: Machines that announced that they leave.
        missing: Machines that never registered.
        growth: Observed mean length over the stated one.
        slow_before: Machines that were planned as slower ones.
        untrained: Machines that cannot train.
    """
    stated = node_classes(planned)
    known = {view.node.node_id: view for view in views}
    members: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, NodeClass] = {}
    present = [name for name in stated if name not in left | missing and (name not in known or known[name].is_alive)]
    joined = [view for name, view in known.items() if name not in stated and view.is_alive]
    entries = [(name, stated[name]) for name in present]
    entries += [(view.node.node_id, node) for view in joined if (node := _joined(planned, view.node)) is not None]
    problem = with_lengths(planned, growth)
    slow = slow_machines(problem, dict(entries), views, before=slow_before or {})
    for name, node in entries:
        entry = node
        if (share := slow.get(name)) is not None:
            problem, gpu = _with_slower(problem, node.gpu, share)
            entry = node.model_copy(update={"name": f"{node.name}-at-{share:.0%}", "gpu": gpu})
        if name in untrained:
            problem, gpu = _without_training(problem, entry.gpu)
            entry = entry.model_copy(update={"name": f"{entry.name}-untrained", "gpu": gpu})
        classes[entry.name] = entry
        members[entry.name].append(name)
    if not classes:
        return Live(None, {})
    nodes = tuple(
        node.model_copy(update={"count": len(members[name]), "machines": tuple(members[name]) if node.machines else ()})
        for name, node in classes.items()
    )
    names = {node.machine(index): real for node in nodes for index, real in enumerate(members[node.name])}
    now = problem.model_copy(update={"nodes": nodes})
    return Live(now, names, missing, stands_still_s(now, views), slow)


def with_lengths(planned: Problem, growth: float) -> Problem:
    """The problem with lengths that have grown so much; unchanged by a little growth."""
    if round(abs(growth - 1), 3) <= LENGTHS_CHANGED_BY:
        return planned
    lengths = scaled(planned.workload.output_len, growth)
    return planned.model_copy(update={"workload": planned.workload.model_copy(update={"output_len": lengths})})


def _with_slower(problem: Problem, gpu: str, share: float) -> tuple[Problem, str]:
    """The problem with a copy of a GPU type that differs only in speed, and the new type's name."""
    name = f"{gpu} at {share:.0%}"
    if name in problem.gpu_types:
        return problem, name
    spec = problem.gpu_types[gpu]
    slower = {"tflops_bf16": spec.tflops_bf16 * share, "hbm_GBps": spec.hbm_GBps * share}
    rates = tuple(
        rate.model_copy(update={"gpu": name, "tokens_per_second": rate.tokens_per_second * share})
        for rate in problem.measured_rates
        if rate.gpu == gpu
    )
    return _with_type(problem, gpu, name, spec.model_copy(update=slower), rates), name


def _without_training(problem: Problem, gpu: str) -> tuple[Problem, str]:
    """The problem with a copy of a GPU type that is useless for training, and the new type's name."""
    name = f"{gpu} that does not train"
    if name in problem.gpu_types:
        return problem, name
    generating = (rate for rate in problem.measured_rates if rate.gpu == gpu and rate.role != "trainer")
    rates = [rate.model_copy(update={"gpu": name}) for rate in generating]
    rates.append(MeasuredRate(gpu=name, role="trainer", tokens_per_second=_NO_TOKENS_PER_SECOND))
    return _with_type(problem, gpu, name, problem.gpu_types[gpu], rates), name


def _with_type(problem: Problem, gpu: str, name: str, spec: GpuType, rates: Sequence[MeasuredRate]) -> Problem:
    """The problem with a type that has the cost model's constants of another."""
    constants = problem.cost_model
    by_type = {
        key: {**value, name: value.get(gpu, value["default"])}
        for key in ("mfu_train", "mfu_infer")
        if isinstance(value := getattr(constants, key), dict)
    }
    update = {
        "gpu_types": {**problem.gpu_types, name: spec},
        "measured_rates": (*problem.measured_rates, *rates),
        "cost_model": constants.model_copy(update=by_type),
    }
    return problem.model_copy(update=update)


def _joined(planned: Problem, node: pb.Node) -> NodeClass | None:
    """An entry for a machine that the problem does not name; None if its GPUs are not described."""
    counts: Counter[str] = Counter()
    for each in node.accelerators:
        counts[each.kind] += each.count
    if len(counts) != 1:
        return None
    ((kind, count),) = counts.items()
    alike = next((entry for entry in planned.nodes if (entry.gpu, entry.gpus) == (kind, count)), None)
    if kind not in planned.gpu_types or count > MAX_GPUS:
        return None
    region = node.site or (alike.region if alike is not None else planned.nodes[0].region)
    entry = alike or planned.nodes[0]
    price = node.price_per_hour / count if node.HasField("price_per_hour") else entry.price_per_gpu_hour
    name = f"joined-{kind}-{count}-{region}".replace(" ", "-")
    one: dict[str, object] = {"name": name, "count": 1, "machines": ()}
    return entry.model_copy(update={**one, "gpu": kind, "gpus": count, "region": region, "price_per_gpu_hour": price})
