"""Places reward workers: on GPUs as scorers are, or by a rule on machines whose GPUs do something else.

Workers without GPUs take nothing that the rest of a plan is searched for, so they come after it: the head has one, then
others follow until they keep up with the plan, first machines of the head's region, of these first those that do not
train. Where even all machines do not keep up, they limit the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.planning.worker_placement import Search, gpu_rewards, with_workers, with_workload
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers.interface import Solution, TimeLeft

_ENOUGH = 1 - 1e-9


def with_rewards(model: CostModel, search: Search, *, time_left: TimeLeft, kept: PlanDocument) -> Solution:
    """The best plan found with reward workers, those of `kept` where it has any.

    Where a machine of those that it has without GPUs is gone, others take its part until they keep up again; where
    nothing is known of their time, those that are left do, or else a machine that generates.
    """
    if (kind := gpu_rewards(model)) is not None:
        return with_workers(model, kind, search, time_left=time_left, kept=kept.reward_gpus)
    is_known = model.problem.workload.reward is not None
    found = search(model.over(with_workload(model.problem, reward=None)) if is_known else model, time_left)
    if found.plan is None or not (is_known or kept.reward):
        return found
    if kept.reward:
        reward = _replaced(model, found.plan, kept.reward, found.score.samples_per_second)
    else:
        reward = _placed(model, found.plan, found.score.samples_per_second)
    plan = found.plan.model_copy(update={"reward": reward})
    if not is_known:
        return replace(found, plan=plan)
    score = model.score(plan)
    is_optimal = found.is_optimal and score.samples_per_second >= found.score.samples_per_second * _ENOUGH
    return replace(found, plan=plan if isinstance(score, Score) else None, score=score, is_optimal=is_optimal)


def _placed(model: CostModel, plan: PlanDocument, rate: float) -> tuple[str, ...]:
    """Machines of a new plan; empty for the head alone."""
    nodes, head, trains = model.nodes, plan.train[0].node, {share.node for share in plan.train}

    def order(name: str) -> tuple[bool, bool, bool]:
        return name != head, nodes[name].region != nodes[head].region, name in trains

    found = _keeping_up(model, sorted(nodes, key=order), rate)
    return () if found == (head,) else found


def _replaced(model: CostModel, plan: PlanDocument, kept: tuple[str, ...], rate: float) -> tuple[str, ...]:
    """Those of a running plan's machines that are left, and others that generate: these can start one."""
    left = tuple(name for name in kept if name in model.nodes)
    generate = tuple(dict.fromkeys(each.node for each in plan.gen))
    if left == kept or model.problem.workload.reward is None:
        return left or generate[:1]
    return _keeping_up(model, dict.fromkeys((*left, *generate)), rate) or generate[:1]


def _keeping_up(model: CostModel, names: Iterable[str], rate: float) -> tuple[str, ...]:
    """The first of those that can have a worker whose workers score that many samples per second together, or all."""
    work, nodes = model.problem.workload.reward, model.nodes
    assert work is not None
    found: list[str] = []
    scored = 0.0
    for name in names:
        if found and scored >= rate * _ENOUGH:
            break
        if model.reward.fits(nodes[name], 1):
            found.append(name)
            scored += work.samples_per_second(nodes[name].gpu)
    return tuple(found)
