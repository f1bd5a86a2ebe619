"""The problem as it is now: machines that joined, left or slowed, and lengths that changed. Pure.

A machine of the problem counts as there until it has registered once; from then on its heartbeats decide. A machine
that the problem does not name is added when its accelerators are of a type that the problem describes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.output_lengths import scaled
from services.scheduler.plan_document import PlanDocument, node_classes
from services.scheduler.problem import NodeClass, Problem

SLOW_BELOW = 0.7
"""Of the median of machines alike: below, a machine is planned for as a slower one."""
LENGTHS_CHANGED_BY = 0.1


@dataclass(frozen=True, slots=True)
class Live:
    """A problem over the machines that are there, and what its machines are really called."""

    problem: Problem | None
    """None when no machine is left."""
    node_ids: Mapping[str, str]
    """By the problem's id of a machine."""

    def from_real(self, plan: PlanDocument) -> PlanDocument:
        """A plan over real machines under the problem's names, without the machines that are gone."""
        back = {real: name for name, real in self.node_ids.items()}
        gen = [each.model_copy(update={"node": back[each.node]}) for each in plan.gen if each.node in back]
        train = [each.model_copy(update={"node": back[each.node]}) for each in plan.train if each.node in back]
        return PlanDocument(gen=tuple(gen), train=tuple(train))


def live_problem(planned: Problem, views: Sequence[pb.NodeView], *, left: frozenset[str], growth: float) -> Live:
    """The problem as it is.

    Args:
        planned: As it was stated.
        views: The inventory.
        left: Machines that said that they leave.
        growth: Mean length seen over the stated one.
    """
    stated = node_classes(planned)
    known = {view.node.node_id: view for view in views}
    members: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, NodeClass] = {}
    gpu_types = dict(planned.gpu_types)
    slow = _slow_machines(views)
    present = [name for name in stated if name not in left and (name not in known or known[name].is_alive)]
    joined = [view for name, view in known.items() if name not in stated and view.is_alive]
    entries = [(name, stated[name]) for name in present]
    entries += [(view.node.node_id, node) for view in joined if (node := _joined(planned, view.node)) is not None]
    for name, node in entries:
        entry = node
        if (share := slow.get(name)) is not None:
            spec, gpu = gpu_types[node.gpu], f"{node.gpu} at {share:.0%}"
            slower = {"tflops_bf16": spec.tflops_bf16 * share, "hbm_GBps": spec.hbm_GBps * share}
            gpu_types[gpu] = spec.model_copy(update=slower)
            entry = node.model_copy(update={"name": f"{node.name}-at-{share:.0%}", "gpu": gpu})
        classes[entry.name] = entry
        members[entry.name].append(name)
    if not classes:
        return Live(None, {})
    nodes = tuple(node.model_copy(update={"count": len(members[name])}) for name, node in classes.items())
    update: dict[str, object] = {"nodes": nodes, "gpu_types": gpu_types}
    if abs(growth - 1) > LENGTHS_CHANGED_BY:
        lengths = scaled(planned.workload.output_len, growth)
        update["workload"] = planned.workload.model_copy(update={"output_len": lengths})
    names = {f"{name}-{index}": real for name, reals in members.items() for index, real in enumerate(reals)}
    return Live(planned.model_copy(update=update), names)


def _joined(planned: Problem, node: pb.Node) -> NodeClass | None:
    """A machine that the problem does not name, as an entry of it; None where its GPUs are not described."""
    counts: Counter[str] = Counter()
    for each in node.accelerators:
        counts[each.kind] += each.count
    if len(counts) != 1:
        return None
    ((kind, count),) = counts.items()
    alike = next((entry for entry in planned.nodes if (entry.gpu, entry.gpus) == (kind, count)), None)
    if kind not in planned.gpu_types:
        return None
    region = node.site or (alike.region if alike is not None else planned.nodes[0].region)
    entry = alike or planned.nodes[0]
    price = node.price_per_hour / count if node.HasField("price_per_hour") else entry.price_per_gpu_hour
    name = f"joined-{kind}-{count}-{region}".replace(" ", "-")
    update = {"name": name, "gpu": kind, "gpus": count, "region": region, "price_per_gpu_hour": price, "count": 1}
    return entry.model_copy(update=update)


def _slow_machines(views: Sequence[pb.NodeView]) -> dict[str, float]:
    """Machines far below the median rate of those with the same accelerators, with their share of it in tenths."""
    rates: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for view in views:
        kinds = tuple((each.kind, each.count) for each in view.node.accelerators)
        for rate in view.rates:
            if view.is_alive and rate.role == pb.ROLE_GENERATOR and rate.tokens_per_second > 0:
                rates[kinds][view.node.node_id] = rate.tokens_per_second
    found: dict[str, float] = {}
    for alike in rates.values():
        usual = median(alike.values())
        found |= {
            name: max(0.1, round(rate / usual, 1))
            for name, rate in alike.items()
            if len(alike) > 2 and rate < SLOW_BELOW * usual
        }
    return found
