"""Builds generators and a trainer, with the speeds of the scheduler's cost model, from a problem, a plan and a mode."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.cost_model.training_step import TrainingStep
from services.scheduler.problem.plan_document import Layout, PlanDocument, TrainShare
from services.scheduler.problem.problem import NodeClass
from simulator.virtual_run.virtual_generator import GeneratorSpec


class Mode(StrEnum):
    """How generation and training share time and machines."""

    COLOCATED_SYNC = "colocated_sync"
    """All GPUs generate, then all train, in turn; the plan is ignored."""
    DISAGGREGATED_SYNC = "disaggregated_sync"
    """The plan's generators make a step's samples, then its trainers train on them all."""
    STREAMING = "streaming"
    """The same, but trainers start on the samples that are ready."""
    ONE_STEP = "one_step"
    """Streaming, one policy version behind."""
    ASYNC = "async"
    """Streaming, as many versions behind as the problem allows."""

    @property
    def streams(self) -> bool:
        """Whether training starts before all of the step's samples are finished."""
        return self not in (Mode.COLOCATED_SYNC, Mode.DISAGGREGATED_SYNC)

    def staleness(self, allowed: int) -> int:
        """Policy versions that a sample may be behind in this mode, within the problem's bound."""
        return {Mode.ASYNC: allowed, Mode.ONE_STEP: 1}.get(self, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """The training pool as one machine."""

    sample_s: float
    """Time of a sample with the mean number of tokens."""
    mean_tokens: float
    """Mean tokens of prompt and completion."""
    prompt_tokens: float
    end_s: float
    """Time of a step's end: the exposed part of the all-reduce, and fixed costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The parts of a run."""

    generators: tuple[GeneratorSpec, ...]
    trainer: TrainerSpec
    transfer_s: dict[str, float]
    """Transfer time of new weights, by region; infinite if unreachable."""
    staleness: int


class SetupError(Exception):
    """The plan cannot run; the message says why."""


def from_plan(model: CostModel, plan: PlanDocument, mode: Mode) -> Setup:
    """The generators and trainers of the plan. Raises SetupError."""
    allowed = mode.staleness(model.problem.workload.staleness)
    model = with_staleness(model, allowed)
    score = model.score(plan)
    if isinstance(score, Infeasible):
        raise SetupError(score.reason)
    homes = model.homes(plan)
    specs = [
        _limited(_replica(model, each.replicas.node, each.replicas.layout, index), each.state.batch + 1)
        for each in score.generation
        if each.state is not None
        for index in range(each.replicas.count)
    ]
    return Setup(
        generators=_filled(specs, (allowed + 1) * model.demand.samples_per_step),
        trainer=_trainer(model, _compute_s(model, plan, score.training), score.training.exposed_allreduce_s),
        transfer_s={
            region: model.network.transfer_s(homes, region, model.demand.weight_bytes)
            for region in dict.fromkeys(spec.region for spec in specs)
        },
        staleness=allowed,
    )


def colocated(model: CostModel, *, is_blind: bool = False, tp: int | None = None) -> Setup:
    """Every GPU of one site does everything in turn. Raises SetupError.

    Args:
        model: The cost model.
        is_blind: Work is divided evenly, as if all GPUs were alike, so all wait for the slowest.
        tp: Tensor-parallel degree of all generators; None uses each machine's best.
    """
    specs: list[GeneratorSpec] = []
    for node in model.problem.nodes:
        degrees = [degree for degree in model.degrees[node.name] if tp in (None, degree)]
        if not degrees:
            raise SetupError(f"{node.name}: the model does not fit its GPUs, and all generate")
        best = max(degrees, key=partial(_rate, model, node))
        for index in range(node.count):
            name = node.machine(index)
            specs += [_replica(model, name, model.layout(node, best), number) for number in range(node.gpus // best)]
    pool = [TrainShare(node=name, gpus=node.gpus) for name, node in model.nodes.items()]
    shares, mesh = model.pools.arranged(pool, model.nodes)
    step = model.pools.step(PlanDocument(train=shares, mesh=mesh), model.nodes)
    if math.isinf(step.step_s):
        raise SetupError("training on all machines spans regions that are not linked")
    compute_s = step.compute_s
    if is_blind:
        slowest = min(model.gpu_training_rate[node.name] for node in model.problem.nodes)
        compute_s = model.demand.samples_per_step / (slowest * sum(share.gpus for share in pool))
        worst = max(specs, key=lambda spec: spec.steps_s[-1] / spec.max_samples)
        specs = [replace(spec, steps_s=worst.steps_s, prefill_s=worst.prefill_s) for spec in specs]
    return Setup(
        generators=_filled(specs, model.demand.samples_per_step),
        trainer=_trainer(model, compute_s, step.exposed_allreduce_s),
        transfer_s=dict.fromkeys((spec.region for spec in specs), 0.0),
        staleness=0,
    )


def with_staleness(model: CostModel, allowed: int) -> CostModel:
    """The model for another staleness bound; batches let the longest sample end in its window.

    Without a significant window, smaller batches would only add rounds to a step.
    """
    workload = model.problem.workload.model_copy(update={"staleness": allowed})
    constraints = model.problem.constraints.model_copy(update={"tail_blocking": allowed > 0})
    return model.over(model.problem.model_copy(update={"workload": workload, "constraints": constraints}))


def _rate(model: CostModel, node: NodeClass, tp: int) -> float:
    state = model.replica(node, tp)
    return state.samples_per_second / tp if state is not None else 0.0


def _replica(model: CostModel, name: str, layout: Layout, index: int) -> GeneratorSpec:
    node = model.nodes[name]
    replica = ReplicaModel(model.problem, model.demand, node, *layout)
    state = replica.at(replica.batch())
    if state is None:
        raise SetupError(f"tp {layout.tp} on {name}: no memory for the cache of one sample")
    return GeneratorSpec(
        name=f"{name}/{layout.gpus}x{index}",
        node=name,
        region=node.region,
        steps_s=tuple(replica.step_s(count) for count in range(state.batch + 1)),
        prefill_s=replica.prefill_s,
        prefill_token_s=replica.prefill_token_s,
        pause_s=state.pause_s,
    )


def _limited(spec: GeneratorSpec, max_samples: int) -> GeneratorSpec:
    return replace(spec, steps_s=spec.steps_s[: max_samples + 1])


def _filled(specs: Iterable[GeneratorSpec], samples: float) -> tuple[GeneratorSpec, ...]:
    """Divide samples under way in proportion to capacity if all generators could take more than allowed."""
    specs = tuple(specs)
    share = min(1.0, samples / sum(spec.max_samples for spec in specs))
    return tuple(_limited(spec, math.ceil(spec.max_samples * share)) for spec in specs)


def _compute_s(model: CostModel, plan: PlanDocument, step: TrainingStep) -> float:
    """The longer of the trainer's and its critic's computation; both where they share GPUs."""
    critic_s = model.demand.samples_per_step / model.critic.samples_per_second(plan, model.nodes)
    return max(step.compute_s + step.critic_s, critic_s)


def _trainer(model: CostModel, compute_s: float, exposed_allreduce_s: float) -> TrainerSpec:
    demand = model.demand
    return TrainerSpec(
        sample_s=compute_s / demand.samples_per_step,
        mean_tokens=demand.trained_tokens,
        prompt_tokens=model.problem.workload.prompt_len,
        end_s=exposed_allreduce_s + model.problem.cost_model.train_overhead_s,
    )
