"""Answers a planning problem from the wire with a plan in the contract's form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from penstock.config import ConfigError
from penstock.errors import InvalidFieldError, require
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.calibrated import with_constants
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.first_fit import InfeasiblePlanError
from services.scheduler.planning.market import purchases
from services.scheduler.planning.plan_message import put_services, put_trainers
from services.scheduler.planning.plan_report import FeasiblePlan
from services.scheduler.planning.solve import make_plan
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem, parse_problem
from services.scheduler.solvers.interface import ProblemTooLargeError, TimeLeft, part_of
from services.scheduler.solvers.registry import AUTO, SOLVERS

_SOLVE_SHARE, _ADVICE_SHARE = 0.8, 0.3
"""Share of the time after which the search ends, and of what is then left to look for what to buy next: callers who
wait no longer than the budget get their plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """What is to be planned for a run."""

    run_id: str
    problem: Problem
    """With the constants of the cost model; slow machines have their own."""
    cost_model: str
    solver: str
    keeps_trainers: bool
    """Whether trainers of a running plan stay, which they do until one of their machines is gone."""


def checked_task(request: pb.CreatePlanRequest, *, cost_model: str) -> PlanTask:
    """The task of a request with a problem, by the named cost model. Raises InvalidFieldError."""
    solver = request.solver or AUTO
    require(solver in SOLVERS, "solver", solver, f"one of {', '.join(SOLVERS)} for a problem_json")
    try:
        problem = with_constants(parse_problem(request.problem_json, source="problem_json"), cost_model)
    except ConfigError as error:
        raise InvalidFieldError("; ".join(str(error).splitlines()[:8]), field="problem_json") from error
    return PlanTask(
        run_id=request.run_id,
        problem=problem,
        cost_model=cost_model,
        solver=solver,
        keeps_trainers=request.keeps_trainers,
    )


def plan_task(
    task: PlanTask,
    *,
    time_left: TimeLeft,
    start: PlanDocument | None,
    keeps_pool: bool,
    critic_machines: Collection[str] | None = None,
    is_advised: bool = False,
) -> pb.Plan:
    """A plan over the problem's own machines, its generators and its training pool.

    The search begins with the plan `start`; with `keeps_pool` its trainers stay. Services that it has stay where they
    are; a critic that it lacks is placed on one of `critic_machines`, or on any. With `is_advised` the rest of the time
    looks for what one more machine would bring.

    Raises InvalidFieldError if the solver cannot treat a problem of this size, InfeasiblePlanError if no plan can run.
    """
    running = start if keeps_pool else None
    starts = () if start is None else (start,)
    try:
        model = CostModel(task.problem, name=task.cost_model)
        solving = part_of(time_left, _SOLVE_SHARE if is_advised else 1.0)
        report = make_plan(
            model, task.solver, time_left=solving, starts=starts, running=running, critic_machines=critic_machines
        )
    except ProblemTooLargeError as error:
        raise InvalidFieldError(f"solver: {error}", field="solver") from error
    if not isinstance(report, FeasiblePlan):
        reason = report.reason or "time ran out before one was found"
        raise InfeasiblePlanError(f"no plan can run: {reason}", problem=task.problem.id)
    message = _as_message(report, task.run_id)
    advising = part_of(time_left, _ADVICE_SHARE)
    for each in purchases(model, report.solution, time_left=advising, seed=0) if is_advised else ():
        message.next_purchases.add(
            num_gpus=each.num_gpus, gpu=each.gpu, site=each.region, usd_per_hour=each.usd_per_hour, gain=each.gain
        )
    return message


def _as_message(report: FeasiblePlan, run_id: str) -> pb.Plan:
    solution = report.solution
    message = pb.Plan(run_id=run_id, solver=solution.solver, expected_tokens_per_second=report.tokens_per_second)
    if (bound := solution.upper_bound_samples_per_second) is not None:
        message.bound_tokens_per_second = bound * report.model.demand.completion_tokens
    if report.usd_per_hour > 0:
        message.cost_per_million_tokens = report.usd_per_million_tokens
    message.explanation = (
        f"{report.score.samples_per_second:.4g} samples/s by the cost model {report.model.name}, limited by "
        f"{report.score.limit.value}; generators idle {report.generation_idle:.0%}, "
        f"trainers {report.training_idle:.0%}"
    )
    _assign(message, report)
    return message


def _assign(message: pb.Plan, report: FeasiblePlan) -> None:
    model, plan, generated = report.model, report.plan, report.score.generated_samples_per_second
    taken: Counter[str] = Counter()

    def indices(node: str, gpus: int) -> range:
        taken[node] += gpus
        return range(taken[node] - gpus, taken[node])

    put_trainers(message, plan, [model.gpu_training_rate[model.nodes[share.node].name] for share in plan.train])
    for share in plan.train:
        taken[share.node] += share.gpus
    for each in report.score.generation:
        replicas = each.replicas
        message.assignments.add(
            node_id=replicas.node,
            role=pb.ROLE_GENERATOR,
            accelerator_indices=indices(replicas.node, replicas.gpus),
            tensor_parallel=replicas.tp,
            pipeline_parallel=replicas.pp if replicas.pp > 1 else 0,
            num_replicas=replicas.count,
            num_concurrent_samples=each.state.batch if each.state is not None else 0,
            share=each.fresh_samples_per_second / generated,
        )
    put_services(message, plan, taken)
