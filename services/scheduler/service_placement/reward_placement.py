"""Places reward workers: on GPUs as scorers are, or by a rule on machines whose GPUs do something else.

Workers without GPUs take nothing that the rest of a plan is searched for, so they come after it: first on machines
without GPUs of the head's region, where they take nothing from anybody, then on the head, then on others until they
keep up with the plan, first those of the head's region, of these first those that do not train. Where even all machines
do not keep up, they limit the plan.
"""

from __future__ import annotations

import math
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.service_placement.service_places import center_place
from services.scheduler.service_placement.worker_placement import Search, gpu_rewards, with_workers, with_workload
from services.scheduler.solvers.interface import Solution, TimeLeft

_ENOUGH = 1 - 1e-9


def with_rewards(model: CostModel, search: Search, *, time_left: TimeLeft, kept: PlanDocument) -> Solution:
    """The best plan found with reward workers, those of `kept` where it has any.

    Of those that it has without GPUs, on the machines that are left; where none is, on one that generates. If it is
    known what they take, others are added until they keep up.
    """
    if (kind := gpu_rewards(model)) is not None:
        return with_workers(model, kind, search, time_left=time_left, kept=kept.reward_gpus)
    is_known = model.problem.workload.reward is not None
    found = search(model.over(with_workload(model.problem, reward=None)) if is_known else model, time_left)
    if found.plan is None or not (is_known or kept.reward):
        return found
    reward = tuple(name for name in kept.reward if name in model.nodes or name in model.hosts)
    if kept.reward and not reward:
        reward = (found.plan.gen[0].node,)
    if is_known:
        center = None if kept.broker is None else kept.broker.node
        reward = _keeping_up(model, found.plan, found.score.samples_per_second, begun=reward, center=center)
    plan = found.plan.model_copy(update={"reward": reward})
    if not is_known:
        return replace(found, plan=plan)
    score = model.score(plan)
    keeps_up = score.samples_per_second >= found.score.samples_per_second * _ENOUGH
    # All machines with GPUs that can have one do, around any plan; of hosts, those beside the head.
    is_optimal = found.is_optimal and (keeps_up or not (kept.reward or model.hosts))
    proved = found.upper_bound_samples_per_second
    return replace(
        found,
        plan=plan if isinstance(score, Score) else None,
        score=score,
        upper_bound_samples_per_second=None if proved is None else min(proved, most_rewarded(model)),
        is_optimal=is_optimal,
    )


def most_rewarded(model: CostModel) -> float:
    """Samples per second of reward workers without GPUs on all machines; infinite if they never limit a plan."""
    work = model.problem.workload.reward
    if work is None or work.gpu_memory_GB:
        return math.inf
    fitting = (node for node in model.problem.nodes if model.reward.fits(node, 1))
    on_hosts = sum(model.reward.fits_host(host, brokers=None) for host in model.hosts.values())
    return on_hosts * work.samples_per_second("") + sum(
        node.count * work.samples_per_second(node.gpu) for node in fitting
    )


def _keeping_up(
    model: CostModel, plan: PlanDocument, rate: float, *, begun: tuple[str, ...], center: str | None
) -> tuple[str, ...]:
    """Machines whose workers score that many samples per second, or all that can have one; empty for the head alone.

    Those that are `begun` stay. The `center` has the broker; None where the plan is to place it.
    """
    work, nodes = model.problem.workload.reward, model.nodes
    assert work is not None
    head, trains = plan.train[0].node, {share.node for share in plan.train}
    # A machine without GPUs is started once, by what the first plan has there.
    hosts = [] if begun else _hosts(model, nodes[head].region, center or center_place(model.problem, head))

    def order(name: str) -> tuple[bool, bool, bool, bool]:
        is_apart = name in nodes and nodes[name].region != nodes[head].region
        return name not in hosts, name != head, is_apart, name in trains

    found: list[str] = []
    scored = 0.0
    # While a run goes on, a `penstock node` starts them, which a machine that only trains need not have.
    only_train = trains - {each.node for each in plan.gen} | {head} if begun else frozenset()
    others = [name for name in nodes if name not in begun and name not in only_train]
    fitting = [*hosts, *(name for name in others if model.reward.fits(nodes[name], 1))]
    for name in (*begun, *sorted(fitting, key=order)):
        if found and name not in begun and scored >= rate * _ENOUGH:
            break
        found.append(name)
        scored += work.samples_per_second(nodes[name].gpu if name in nodes else "")
    return () if found == [head] else tuple(found)


def _hosts(model: CostModel, region: str, center: str) -> list[str]:
    """Machines without GPUs of a region that have the cores and memory for a worker, one broker beside it."""
    return [
        name
        for name, host in model.hosts.items()
        if host.region == region and model.reward.fits_host(host, brokers=1 if name == center else None)
    ]
