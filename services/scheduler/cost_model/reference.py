"""RM-1, the reference cost model: what a plan achieves in steady state, samples per second.

Throughput is the smaller of the generators' and the trainers' rates. The generators' rate falls with the throughput
itself: each step's weight update pauses every replica, and a replica behind a slow link holds weights that lag by the
steps that pass during the transfer. So it is the fixed point of a decreasing function, found by bisection. Staleness
bounds the samples under way, and so the batches. Source: RM-1; docs/planning.md gives the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from services.scheduler.cost_model.critic_cost import CriticModel
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.layouts import layouts, usable_bytes
from services.scheduler.cost_model.network import Network
from services.scheduler.cost_model.pool_memory import PoolMemory, scorer_bytes
from services.scheduler.cost_model.replica import ReplicaModel, ReplicaState
from services.scheduler.cost_model.reward import RewardModel
from services.scheduler.cost_model.training_step import Pool, TrainingStep, gpu_samples_per_second
from services.scheduler.meshes.training_pools import TrainingPools
from services.scheduler.problem.plan_document import (
    Layout,
    PlanDocument,
    Replicas,
    host_classes,
    node_classes,
    placement_error,
)
from services.scheduler.problem.problem import NodeClass, Problem

RM1 = "rm1"
_BISECTIONS = 60
_TAIL_SHRINKS_BY = 0.9
_SMALLEST_BATCH_SHARE = 0.02
"""If the longest sample limits a plan, smaller batches are tried in these steps, down to this share of the largest."""


class Limit(StrEnum):
    """The limit of a plan's throughput."""

    GENERATION = "generation"
    TRAINING = "training"
    SCORING = "scoring"
    CRITIC = "critic"
    REWARD = "reward"
    TAIL = "tail"
    """The longest sample must finish inside its staleness window."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Equal replicas of one active machine."""

    replicas: Replicas
    state: ReplicaState | None
    """One replica; None if the staleness bound leaves it less than one sequence."""
    duty: float
    """Share of its samples that are fresh enough to be trained on, 0 to 1."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second that all of them make between weight updates, fresh or not."""
        return self.replicas.count * self.state.samples_per_second if self.state is not None else 0.0

    @property
    def fresh_samples_per_second(self) -> float:
        """The part of that rate that is fresh enough to be trained on."""
        return self.samples_per_second * self.duty


@dataclass(frozen=True, slots=True)
class Score:
    """What a plan achieves."""

    samples_per_second: float
    limit: Limit
    training: TrainingStep
    generation: tuple[Generation, ...]

    @property
    def generated_samples_per_second(self) -> float:
        """Fresh samples per second of all generators between weight updates."""
        return sum(each.fresh_samples_per_second for each in self.generation)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The plan cannot run, or trains nothing."""

    reason: str
    samples_per_second: float = 0.0


class CostModel:
    """The cost model of one problem. Caches its results per replica, so score many plans with one model.

    Args:
        problem: Problem with the constants to use.
        name: Name that answers report; pass another one for a problem with other constants.
    """

    def __init__(self, problem: Problem, *, name: str = RM1) -> None:
        self.problem = problem
        self.name = name
        self.demand = demand_of(problem)
        self.network = Network(problem.links)
        self.nodes = node_classes(problem)
        """Each machine's entry, by the machine's id."""
        self.hosts = host_classes(problem)
        """The same of machines without GPUs."""
        self.layouts = {node.name: layouts(problem, self.demand, node) for node in problem.nodes}
        """Layouts of replicas that fit, by node entry."""
        self.degrees = {
            name: tuple(dict.fromkeys(layout.gpus for layout in found)) for name, found in self.layouts.items()
        }
        """GPUs that a replica can have, by node entry, ascending."""
        self.usable_bytes = {node.name: usable_bytes(problem, node) for node in problem.nodes}
        """Usable memory of each GPU, by node entry."""
        self.pool_memory = PoolMemory(problem, self.demand, self.usable_bytes)
        """Which GPUs can train together."""
        self.pools = TrainingPools(problem, self.demand, self.network, self.pool_memory, self.usable_bytes)
        """How they do."""
        self.gpu_training_rate = {
            node.name: gpu_samples_per_second(problem, self.demand, node) for node in problem.nodes
        }
        """Samples per second of one training GPU, by node entry."""
        self.gpu_scoring_rate = {node.name: self._scoring_rate(node) for node in problem.nodes}
        """Samples per second of one scorer, by node entry; 0 where its model does not fit, infinite without a task."""
        self.critic = CriticModel(problem, self.network, self.usable_bytes)
        """A critic of its own, if the workload has one."""
        self.reward = RewardModel(problem, self.usable_bytes)
        """Reward workers, if the workload says what they take."""
        self._models = {
            (node.name, layout): ReplicaModel(problem, self.demand, node, *layout)
            for node in problem.nodes
            for layout in self.layouts[node.name]
        }
        self._states: dict[tuple[str, Layout, int], ReplicaState | None] = {}
        self._best_layouts = {
            (node.name, gpus): self._best_layout(node, gpus)
            for node in problem.nodes
            for gpus in self.degrees[node.name]
        }

    def over(self, problem: Problem) -> CostModel:
        """The same cost model for another problem."""
        return CostModel(problem, name=self.name)

    def layout(self, node: NodeClass, gpus: int) -> Layout:
        """The layout of a replica of that many GPUs that is fastest at its largest batch."""
        return self._best_layouts[node.name, gpus]

    def replica(self, node: NodeClass, gpus: int) -> ReplicaState | None:
        """A replica of that many GPUs at its largest batch; None if that is less than one sequence."""
        layout = self.layout(node, gpus)
        return self.state(node, layout, math.floor(self.largest_batch(node, layout)))

    def state(self, node: NodeClass, layout: Layout, batch: int) -> ReplicaState | None:
        """A replica at this batch; None if it is less than one sequence. The layout must fit."""
        key = (node.name, layout, batch)
        if key not in self._states:
            self._states[key] = self._models[node.name, layout].at(batch)
        return self._states[key]

    def under_way(self, node: NodeClass, layout: Layout, batch: int) -> float:
        """Samples of a replica that are neither queued nor finished."""
        return self._models[node.name, layout].under_way(batch)

    def largest_batch(self, node: NodeClass, layout: Layout) -> float:
        """Sequences that a replica could decode concurrently, not rounded."""
        return self._models[node.name, layout].max_batch

    def _best_layout(self, node: NodeClass, gpus: int) -> Layout:
        def rate(layout: Layout) -> float:
            state = self.state(node, layout, math.floor(self.largest_batch(node, layout)))
            return state.samples_per_second if state is not None else 0.0

        # Of equal ones the first, with fewest stages.
        return max((layout for layout in self.layouts[node.name] if layout.gpus == gpus), key=rate)

    def scored(self, plan: PlanDocument) -> float:
        """Samples per second of all scorers of a plan; infinite if it needs none."""
        if self.problem.workload.scored_task is None:
            return math.inf
        return sum(each.gpus * self.gpu_scoring_rate[self.nodes[each.node].name] for each in plan.score)

    def _scoring_rate(self, node: NodeClass) -> float:
        if self.problem.workload.scored_task is None:
            return math.inf
        if scorer_bytes(self.problem) > self.usable_bytes[node.name]:
            return 0.0
        for rate in self.problem.measured_rates:
            if rate.role == "scorer" and rate.gpu == node.gpu:
                return rate.tokens_per_second / self.demand.trained_tokens
        peak = self.problem.gpu_types[node.gpu].tflops_bf16 * 1e12
        return peak * self.problem.cost_model.mfu(node.gpu, "infer") / self.demand.scored_flops

    def homes(self, plan: PlanDocument) -> frozenset[str]:
        """Regions that send new weights: the head's, where a trainer is Penstock's own, or by RM-1 all of the pool."""
        senders = plan.train[:1] if self.pool_memory.is_even else plan.train
        return frozenset(self.nodes[share.node].region for share in senders)

    def score(self, plan: PlanDocument) -> Score | Infeasible:
        """What the plan achieves, or why it cannot run."""
        if (reason := placement_error(plan, self.nodes, self.hosts)) is not None:
            return Infeasible(reason)
        pool: Pool = [(self.nodes[share.node], share.gpus) for share in plan.train]
        errors = (check(plan) for check in (self._memory_error, self._scoring_error, self._critic_error))
        if reason := next(filter(None, errors), None) or self.reward.error(plan, self.nodes):
            return Infeasible(reason)
        step = self.pools.step(plan, self.nodes)
        if plan.critic is not None:
            step = replace(step, critic_s=self.critic.added_s(plan.critic, self.nodes))
        if math.isinf(step.step_s):
            regions = ", ".join(sorted({node.region for node, _ in pool}))
            return Infeasible(f"the training pool spans regions that are not linked: {regions}")
        score = _Scoring(self, plan, self.homes(plan), step).best()
        if score.samples_per_second <= 0:
            return Infeasible("no replica makes samples that are fresh enough: links are missing or slow")
        return score

    def _scoring_error(self, plan: PlanDocument) -> str | None:
        task = self.problem.workload.scored_task
        if task is None:
            return None if not plan.score else "score: no task of the workload is a service; leave it out"
        if not plan.score:
            return f"score: empty, so nothing computes {task.name}"
        for each in plan.score:
            if not self.gpu_scoring_rate[name := self.nodes[each.node].name]:
                needed, offered = (
                    num_bytes / 1e9 for num_bytes in (scorer_bytes(self.problem), self.usable_bytes[name])
                )
                return (
                    f"a scorer of {task.name} needs {needed:.1f} GB, and a GPU of {each.node} offers {offered:.1f} GB"
                )
        return None

    def _critic_error(self, plan: PlanDocument) -> str | None:
        place = plan.critic
        if (reason := self.critic.error(plan, self.nodes)) is not None or place is None or not place.is_beside_trainer:
            return reason
        taken = self.critic.gpu_bytes(place.gpus)
        reason = self.pools.error_beside(plan, self.nodes, machine=place.node, taken_bytes=taken)
        return None if reason is None else f"critic.is_beside_trainer: beside the critic {reason}"

    def _memory_error(self, plan: PlanDocument) -> str | None:
        if not plan.gen or not plan.train:
            key, verb = ("train", "trains") if plan.gen else ("gen", "generates")
            return f"{key}: empty, so nothing {verb}"
        if (reason := self.pools.error(plan, self.nodes)) is not None:
            return reason
        regions = sorted({self.nodes[share.node].region for share in plan.train})
        if self.problem.constraints.train_single_region and len(regions) > 1:
            return f"training spans the regions {', '.join(regions)}, and constraints.train_single_region forbids that"
        for replicas in plan.gen:
            node = self.nodes[replicas.node]
            if replicas.layout not in self.layouts[node.name]:
                if replicas.pp > 1:
                    known = ", ".join(f"{tp} x {pp}" for tp, pp in self.layouts[node.name])
                    return (
                        f"tp {replicas.tp} x pp {replicas.pp} on {replicas.node}: layouts that fit, of at most "
                        f"constraints.gen_pp {self.problem.constraints.gen_pp} stages: {known or 'none'}"
                    )
                return (
                    f"tp {replicas.tp} on {replicas.node}: degrees that divide {node.gpus} GPUs and "
                    f"{self.problem.model.q_heads} heads, keep to max_tp and hold "
                    f"{self.demand.weight_bytes / 1e9:.1f} GB of weights, "
                    f"{self.usable_bytes[node.name] / 1e9:.1f} GB a GPU: "
                    f"{', '.join(map(str, self.degrees[node.name])) or 'none'}"
                )
        return None


_States = list[ReplicaState | None]
"""State of each kind of replica; None if the batch leaves it less than one sequence."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Replicas of one layout and batch on the machines of one entry."""

    node: NodeClass
    layout: Layout
    stated_batch: int | None
    count: int
    transfer_s: float
    """Transfer time of new weights to them; infinite if they are unreachable."""


class _Scoring:
    """Computes one plan's fixed point."""

    def __init__(self, model: CostModel, plan: PlanDocument, homes: frozenset[str], step: TrainingStep) -> None:
        demand = model.demand
        self._model, self._plan, self._step = model, plan, step
        self._samples_per_step = demand.samples_per_step
        self._versions = model.problem.workload.staleness + 1.0
        """Policy versions within which a sample is usable."""
        # Machines of an entry are alike, and so are their replicas of one layout: they are computed together.
        counts: Counter[tuple[str, Layout, int | None]] = Counter()
        for replicas in plan.gen:
            counts[model.nodes[replicas.node].name, replicas.layout, replicas.batch] += replicas.count
        entries = {node.name: node for node in model.problem.nodes}
        self._kinds: list[_Kind] = []
        for (name, layout, batch), count in counts.items():
            transfer_s = model.network.transfer_s(homes, entries[name].region, demand.weight_bytes)
            self._kinds.append(_Kind(entries[name], layout, batch, count, transfer_s))
        self._batches = [self._largest_batch(kind) for kind in self._kinds]
        """Largest batch of a replica of each kind."""

    def _largest_batch(self, kind: _Kind) -> float:
        fitting = self._model.largest_batch(kind.node, kind.layout)
        return fitting if kind.stated_batch is None else min(fitting, float(kind.stated_batch))

    def best(self) -> Score:
        """The best over the batch sizes worth trying: batches below the limit help only against the tail."""
        most = self._versions * self._samples_per_step
        share = 1.0
        if self._samples_under_way(share) > most:
            share = _largest(lambda candidate: self._samples_under_way(candidate) <= most, upper=1.0)
        best: Score | None = None
        while True:
            score = self._at(share)
            if best is None or score.samples_per_second > best.samples_per_second:
                best = score
            share *= _TAIL_SHRINKS_BY
            if score.limit is not Limit.TAIL or share < _SMALLEST_BATCH_SHARE:
                return best

    def _at(self, share: float) -> Score:
        states = self._states(share)
        trained = self._samples_per_step / self._step.step_s
        scored = self._model.scored(self._plan)
        valued = self._model.critic.samples_per_second(self._plan, self._model.nodes)
        rewarded = self._model.reward.samples_per_second(self._plan, self._model.nodes)
        ceiling = min(trained, scored, valued, rewarded, self._tail(states))
        upper = min(ceiling, self._generated(states, 0.0))
        if self._generated(states, upper) >= upper:
            throughput = upper
            limits = (
                (trained, Limit.TRAINING),
                (scored, Limit.SCORING),
                (valued, Limit.CRITIC),
                (rewarded, Limit.REWARD),
                (ceiling, Limit.TAIL),
            )
            limit = next((limit for rate, limit in limits if upper == rate), Limit.GENERATION)
        else:
            # Only the transfer of weights makes generation fall as training speeds up.
            throughput = _largest(lambda candidate: self._generated(states, candidate) >= candidate, upper=upper)
            limit = Limit.GENERATION
        return Score(throughput, limit, self._step, self._generation(states, throughput))

    def _generation(self, states: _States, throughput: float) -> tuple[Generation, ...]:
        """The generation of each machine's replicas, in the order of the plan."""
        found = {
            (kind.node.name, kind.layout, kind.stated_batch): (state, self._duty(kind.transfer_s, throughput))
            for kind, state in zip(self._kinds, states, strict=True)
        }
        nodes = self._model.nodes
        return tuple(
            Generation(each, *found[nodes[each.node].name, each.layout, each.batch]) for each in self._plan.gen
        )

    def _states(self, share: float) -> _States:
        return [
            self._model.state(kind.node, kind.layout, math.floor(largest * share))
            for kind, largest in zip(self._kinds, self._batches, strict=True)
        ]

    def _samples_under_way(self, share: float) -> float:
        return sum(
            kind.count * self._model.under_way(kind.node, kind.layout, math.floor(largest * share))
            for kind, largest in zip(self._kinds, self._batches, strict=True)
            if kind.transfer_s < math.inf
        )

    def _generated(self, states: _States, throughput: float) -> float:
        """Fresh samples per second that the replicas make while training runs at `throughput`."""
        made, paused = 0.0, 0.0
        for kind, state in zip(self._kinds, states, strict=True):
            if state is not None:
                fresh = kind.count * state.samples_per_second * self._duty(kind.transfer_s, throughput)
                made += fresh
                paused += fresh * state.pause_s
        return made / (1 + paused / self._samples_per_step)

    def _duty(self, transfer_s: float, throughput: float) -> float:
        if math.isinf(transfer_s):
            return 0.0
        lag_versions = transfer_s * throughput / self._samples_per_step
        return max(0.0, min(1.0, (self._versions - lag_versions) / max(1.0, lag_versions)))

    def _tail(self, states: _States) -> float:
        """Throughput at which the longest sample, on the fastest replica, is only just fresh enough."""
        steps_s = [state.step_s for state in states if state is not None]
        if not self._model.problem.constraints.tail_blocking or not steps_s:
            return math.inf
        longest_s = self._model.demand.longest_completion_tokens * min(steps_s)
        if (environment := self._model.problem.workload.environment) is not None:
            longest_s += environment.wait_s
        return self._versions * self._samples_per_step / longest_s


def _largest(holds: Callable[[float], bool], *, upper: float) -> float:
    """Largest number up to `upper` at which a predicate holds that is true at 0 and, once false, stays false."""
    lower = 0.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (lower + upper)
        lower, upper = (middle, upper) if holds(middle) else (lower, middle)
    return lower
