"""Finds the best plan with services on small problems, and proves it: every placement, the highest bound first.

Around a placement all plans of the rest are tried from the highest bound down, until none is above the best so far. A
critic beside the trainer is tried on every machine of each pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.problem.plan_document import CriticPlace, PlanDocument, TrainShare
from services.scheduler.service_placement.placement_space import Placement, PlacementSpace
from services.scheduler.service_placement.worker_placement import with_workload
from services.scheduler.solvers.divisions import plan_of
from services.scheduler.solvers.exhaustive import ExhaustiveSolver, no_plan, ranked
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, TimeLeft
from services.scheduler.solvers.scored import Parts

_NOTHING_REACHED = 1e-6
"""Samples per second in whose units bounds are before there is a plan."""

_WORTH_BOUNDS = 1.02
"""A plan this much better makes bounds so much tighter that they are computed again."""


def best_of_all_placements(
    model: CostModel, *, time_left: TimeLeft, starts: Plans = (), enough: float = math.inf
) -> Solution:
    """The best plan with all services that take GPUs; at its deadline the best so far, and a bound on the rest.

    Raises ProblemTooLargeError. Where the problem has meshes, pools have those that `plan_of` gives them.
    A plan with `enough` samples per second, which something else limits, ends the search.
    """
    return _Search(model, time_left, starts, enough).run()


class _Search:
    """The best plan so far, and the placements that may have a better one."""

    def __init__(self, model: CostModel, time_left: TimeLeft, starts: Plans, enough: float) -> None:
        self._model, self._time_left, self._enough = model, time_left, enough
        workload = model.problem.workload
        self._alone = model.over(with_workload(model.problem, train_tasks=workload.pool_tasks, reward=None))
        self._space = PlacementSpace(model, self._alone, time_left=time_left)
        self._pooled: CostModel | None = None
        """The pool with the critic's tasks: meshes that leave room for them. RM-1 has no meshes."""
        if workload.critic_tasks and model.pool_memory.is_even:
            tasks = (task.model_copy(update={"is_service": False}) for task in workload.critic_tasks)
            pooled = with_workload(model.problem, train_tasks=(*workload.pool_tasks, *tasks), reward=None)
            self._pooled = model.over(pooled)
        self._best: tuple[PlanDocument | None, Score | Infeasible] = (None, no_plan(self._alone))
        self._critic_s: dict[tuple[str, int], float] = {}
        """What a critic beside the trainer adds to a step, by node entry and GPUs."""
        self._num_evaluated = 0
        for start in starts:
            self._try(start)

    def run(self) -> Solution:
        """All placements that may be better, until there is enough."""
        reached = self._rate
        bounds = self._space.bounds(reached or _NOTHING_REACHED)
        while self._rate < min(self._enough, bound := float(bounds[index := int(np.argmax(bounds))])):
            if self._time_left() <= 0 or not self._around(self._space.placement(index)):
                return self._solution(bound)
            bounds[index] = 0.0
            if self._rate > reached * _WORTH_BOUNDS:
                reached = self._rate
                bounds = np.minimum(bounds, self._space.bounds(reached))
        return self._solution(None)

    @property
    def _rate(self) -> float:
        return self._best[1].samples_per_second

    def _solution(self, bound: float | None) -> Solution:
        proved = self._rate if bound is None else bound
        return Solution(*self._best, proved, bound is None, self._num_evaluated, ExhaustiveSolver.name)

    def _around(self, placement: Placement) -> bool:
        """Try the plans around a placement; whether time sufficed."""
        try:
            candidates = ranked(self._alone, time_left=self._time_left, free=placement.free, above=self._rate)
        except ProblemTooLargeError:
            if self._best[0] is None:
                raise
            return False
        for bound, parts in candidates:
            if self._rate >= min(bound, self._enough):
                break
            if self._time_left() <= 0:
                return False
            for plan in self._plans(parts, placement):
                self._try(plan)
        return True

    def _plans(self, parts: Parts, placement: Placement) -> Iterator[PlanDocument]:
        update = {"score": placement.score, "reward_gpus": placement.reward_gpus, "critic": placement.critic}
        plan = plan_of(self._alone, parts).model_copy(update=update)
        if placement.critic is not None or not self._model.problem.workload.critic_tasks:
            yield plan
            return
        plans = [plan]
        if self._pooled is not None:
            plans.append(plan_of(self._pooled, parts).model_copy(update=update))
        for each in plans:
            for share in each.train:
                if self._trained_beside(parts, share) <= self._rate:
                    continue
                beside = CriticPlace(node=share.node, gpus=share.gpus, is_beside_trainer=True)
                yield each.model_copy(update={"critic": beside})

    def _trained_beside(self, parts: Parts, share: TrainShare) -> float:
        """The most that a pool trains with a critic on the GPUs of one of its machines."""
        samples, rates = self._model.demand.samples_per_step, self._alone.gpu_training_rate
        trained = sum(part.train_gpus * rates[part.node.name] for part in parts)
        key = (self._model.nodes[share.node].name, share.gpus)
        if key not in self._critic_s:
            self._critic_s[key] = self._model.critic.step_s(self._model.nodes[share.node], share.gpus)
        step_s = samples / trained + self._model.problem.cost_model.train_overhead_s + self._critic_s[key]
        return samples / step_s * (1 + 1e-12)

    def _try(self, plan: PlanDocument) -> None:
        score = self._model.score(plan)
        self._num_evaluated += 1
        if isinstance(score, Score):
            self._best = max(self._best, (plan, score), key=lambda each: each[1].samples_per_second)
        elif self._num_evaluated == 1:
            self._best = (None, score)
