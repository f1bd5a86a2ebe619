"""Proposes places for all services at once where not all can be tried: a linear program over GPUs by entry and role.

It maximises the rate with which every role keeps up: GPUs of an entry generate at the rate of its best replicas, train,
score or reward. Samples under way are bounded as in `solvers/generation_bound.py`; pauses, the fixed time of a step,
and stale samples behind links are taken at the rate of the program before. For each region or set of regions that may
train, and each place of a critic, there is a program. Services get as many GPUs as the best ones give them, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import CriticPlace, GpuWorkers, PlanDocument
from services.scheduler.problem.problem import NodeClass
from services.scheduler.service_placement.worker_placement import gpu_rewards, packed, scorers, with_workload
from services.scheduler.solvers.generation_bound import GenerationBound
from services.scheduler.solvers.interface import TimeLeft
from services.scheduler.solvers.scored import homes_of, ordered_nodes

_PASSES = 2
_MOST = 3
"""Proposals."""
_CRITIC_GPUS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The answer of one program."""

    rate: float
    gpus: Mapping[str, Mapping[str, float]]
    """By role, then by entry."""


class RelaxedPlacement:
    """The programs of one problem."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        workload = model.problem.workload
        self._alone = model.over(with_workload(model.problem, train_tasks=workload.pool_tasks, reward=None))
        self._generation = GenerationBound(self._alone)
        self._nodes = ordered_nodes(model.problem)
        self._made = {node.name: self._generation.best_worth(node)[:, -1] / node.gpus for node in self._nodes}
        kinds = {"score": scorers(model), "reward_gpus": gpu_rewards(model)}
        self._rates = {role: kind.rates for role, kind in kinds.items() if kind is not None}

    def proposals(self, machines: Collection[str] | None = None, *, time_left: TimeLeft) -> list[PlanDocument]:
        """Places of all services, the best first; a critic only on those `machines`, or any.

        A proposal without a critic, where there must be one, leaves its place to another search. Places of a critic
        that time does not reach are left out.
        """
        found: list[tuple[float, PlanDocument]] = []
        for index, critic in enumerate(self._critics(machines)):
            if index and time_left() <= 0:
                break
            solved = [self._solved(home, critic) for home in homes_of(self._model.problem)]
            best = max(solved, key=lambda each: each.rate)
            if best.rate > 0 and (plan := self._placed(best, critic)) is not None:
                found.append((best.rate, plan))
        return [plan for _, plan in sorted(found, key=lambda each: -each[0])[:_MOST]]

    def _critics(self, machines: Collection[str] | None) -> Iterator[CriticPlace | None]:
        yield None
        if not self._model.problem.workload.critic_tasks:
            return
        for node in self._nodes:
            names = [node.machine(index) for index in range(node.count)]
            allowed = [name for name in names if machines is None or name in machines]
            for gpus in _CRITIC_GPUS:
                if allowed and gpus <= node.gpus and self._model.critic.fits(node, gpus):
                    # Other services begin with the last machine, so that this one may stay whole.
                    yield CriticPlace(node=allowed[0], gpus=gpus)

    def _solved(self, home: frozenset[str], critic: CriticPlace | None) -> _Relaxed:
        answer = _Relaxed(0.0, {})
        for _ in range(_PASSES):
            answer = self._program(home, critic, answer.rate)
        return answer

    def _program(self, home: frozenset[str], critic: CriticPlace | None, before: float) -> _Relaxed:
        model, constants = self._model, self._model.problem.cost_model
        samples = model.demand.samples_per_step
        program = mathopt.Model(name="roles")
        rate = program.add_variable(lb=0, ub=self._most(critic))
        roles = ("made", "trained", *self._rates)
        gpus = {
            role: {node.name: program.add_variable(lb=0, ub=node.gpus * node.count) for node in self._nodes}
            for role in roles
        }
        for node in self._nodes:
            taken = critic.gpus if critic is not None and model.nodes[critic.node] is node else 0
            total = mathopt.fast_sum(gpus[role][node.name] for role in roles)
            program.add_linear_constraint(total <= node.gpus * node.count - taken)
            if node.region not in home:
                program.add_linear_constraint(gpus["trained"][node.name] <= 0)
        paused = _stretched(before, constants.sync_pause_s / samples)
        fresh = {node.name: self._fresh(home, node, before) for node in self._nodes}
        for row, price in enumerate(self._generation.prices):
            made = mathopt.fast_sum(
                gpus["made"][name] * float(worth[row]) * fresh[name] for name, worth in self._made.items()
            )
            program.add_linear_constraint(rate * paused <= made + price * self._generation.most_under_way)
        beside_s = self._beside_s() if critic is None and model.problem.workload.critic_tasks else 0.0
        fixed = _stretched(before, (constants.train_overhead_s + beside_s) / samples)
        values = {"trained": self._alone.gpu_training_rate, **self._rates}
        for role, rates in values.items():
            done = mathopt.fast_sum(gpus[role][name] * rates[name] for name in self._made)
            program.add_linear_constraint(rate * (fixed if role == "trained" else 1.0) <= done)
        memory = mathopt.fast_sum(gpus["trained"][name] * model.usable_bytes[name] / 1e9 for name in self._made)
        program.add_linear_constraint(memory >= self._alone.pool_memory.bounding_bytes / 1e9)
        # Of equally good plans that with the fewest GPUs for services.
        spent = mathopt.fast_sum(gpus[role][name] for role in self._rates for name in self._made)
        program.maximize(rate - spent * 1e-9)
        result = mathopt.solve(program, mathopt.SolverType.GLOP)
        if not result.has_primal_feasible_solution():
            return _Relaxed(0.0, {})
        found = result.variable_values()
        return _Relaxed(
            found[rate], {role: {name: found[each] for name, each in gpus[role].items()} for role in self._rates}
        )

    def _most(self, critic: CriticPlace | None) -> float:
        """What the critic keeps up with; beside the trainer at the least time that it adds to a step."""
        if not self._model.problem.workload.critic_tasks:
            return math.inf
        step_s = self._beside_s()
        if critic is not None:
            step_s = self._model.critic.step_s(self._model.nodes[critic.node], critic.gpus)
        return self._model.demand.samples_per_step / step_s

    def _beside_s(self) -> float:
        critic = self._model.critic
        fitting = [node for node in self._nodes if critic.fits(node, node.gpus)]
        return min((critic.step_s(node, node.gpus) for node in fitting), default=math.inf)

    def _fresh(self, home: frozenset[str], node: NodeClass, rate: float) -> float:
        """Share of an entry's samples that are fresh at a rate: the cost model's rule."""
        transfer_s = self._model.network.transfer_s(home, node.region, self._model.demand.weight_bytes)
        if math.isinf(transfer_s):
            return 0.0
        versions = self._model.problem.workload.staleness + 1.0
        lag = transfer_s * rate / self._model.demand.samples_per_step
        return max(0.0, min(1.0, (versions - lag) / max(1.0, lag)))

    def _placed(self, answer: _Relaxed, critic: CriticPlace | None) -> PlanDocument | None:
        """Whole GPUs on machines; None if there are too few beside a critic."""
        taken = {critic.node: critic.gpus} if critic is not None else {}
        update: dict[str, tuple[GpuWorkers, ...]] = {}
        for role, wanted in answer.gpus.items():
            workers: list[GpuWorkers] = []
            for node in self._nodes:
                gpus = math.ceil(wanted[node.name] - 1e-6)
                placed = packed(node, gpus, taken)
                if sum(each.gpus for each in placed) < gpus:
                    return None
                workers += placed
                for each in placed:
                    taken[each.node] = taken.get(each.node, 0) + each.gpus
            update[role] = tuple(workers)
        return PlanDocument(critic=critic).model_copy(update=update)


def _stretched(rate: float, lost_s: float) -> float:
    """By how much more a stage must do that loses this time for each sample."""
    left = 1 - rate * lost_s
    return 1 / left if left > 0.05 else 20.0
