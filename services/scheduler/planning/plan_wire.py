"""A planning problem that comes over the wire, answered with a plan in the contract's form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.config import MAX_CONFIG_BYTES, ConfigError
from penstock.errors import InvalidFieldError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.planning.first_fit import InfeasiblePlanError
from services.scheduler.planning.solve import plan_document, solve, solve_generation
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem, parse_problem
from services.scheduler.solvers.interface import ProblemTooLargeError, Solution, TimeLeft
from services.scheduler.solvers.registry import AUTO, SOLVERS


def checked_problem(problem_json: str, solver: str) -> tuple[Problem, str]:
    """The problem and the solver's name. Raises InvalidFieldError."""
    if len(problem_json) > MAX_CONFIG_BYTES:
        raise InvalidFieldError(
            f"problem_json: {len(problem_json)} characters, at most {MAX_CONFIG_BYTES} are read", field="problem_json"
        )
    name = solver or AUTO
    if name not in SOLVERS:
        known = ", ".join(SOLVERS)
        raise InvalidFieldError(f"solver: {solver!r} does not solve a problem_json; there is {known}", field="solver")
    try:
        return parse_problem(problem_json, source="problem_json"), name
    except ConfigError as error:
        raise InvalidFieldError("; ".join(str(error).splitlines()[:8]), field="problem_json") from error


def plan_problem(
    problem: Problem,
    *,
    run_id: str,
    solver: str,
    time_left: TimeLeft,
    starts: Sequence[PlanDocument] = (),
    running: PlanDocument | None = None,
) -> pb.Plan:
    """A plan over the problem's own machines: its generators and its training pool; `starts` as of Solver.

    With `running` its training pool stays, and only generators are planned.

    Raises InvalidFieldError when the solver cannot treat a problem of this size, InfeasiblePlanError when none can run.
    """
    model = CostModel(problem)
    try:
        if running is not None:
            solution = solve_generation(model, running, time_left=time_left)
        else:
            solution = solve(model, solver, time_left=time_left, starts=starts)
    except ProblemTooLargeError as error:
        raise InvalidFieldError(f"solver: {error}", field="solver") from error
    if solution.plan is None or not isinstance(solution.score, Score):
        reason = getattr(solution.score, "reason", "the time ended before one was found")
        raise InfeasiblePlanError(f"no plan can run: {reason}", problem=problem.id)
    return _as_message(model, solution, solution.plan, solution.score, run_id)


def _as_message(model: CostModel, solution: Solution, plan: PlanDocument, score: Score, run_id: str) -> pb.Plan:
    document = plan_document(model, solution, solve_s=0.0)
    message = pb.Plan(run_id=run_id, solver=solution.solver, expected_tokens_per_second=document["tokens_per_second"])
    if (bound := solution.upper_bound_samples_per_second) is not None:
        message.bound_tokens_per_second = bound * model.demand.completion_tokens
    if document["usd_per_hour"] > 0:
        message.cost_per_million_tokens = document["usd_per_million_tokens"]
    message.explanation = (
        f"{score.samples_per_second:.4g} samples/s by the cost model {document['cost_model']}, limited by "
        f"{score.limit.value}; generators idle {document['generation_idle']:.0%}, "
        f"trainers {document['training_idle']:.0%}"
    )
    _assign(model, message, plan, score)
    return message


def _assign(model: CostModel, message: pb.Plan, plan: PlanDocument, score: Score) -> None:
    taken: Counter[str] = Counter()

    def indices(node: str, gpus: int) -> range:
        taken[node] += gpus
        return range(taken[node] - gpus, taken[node])

    speeds = [share.gpus * model.gpu_training_rate[model.nodes[share.node].name] for share in plan.train]
    for share, speed in zip(plan.train, speeds, strict=True):
        message.assignments.add(
            node_id=share.node,
            role=pb.ROLE_TRAINER,
            accelerator_indices=indices(share.node, share.gpus),
            share=speed / sum(speeds),
            num_replicas=1,
        )
    rates = [
        each.replicas.count * each.state.samples_per_second * each.duty if each.state else 0.0
        for each in score.generation
    ]
    for each, rate in zip(score.generation, rates, strict=True):
        replicas = each.replicas
        message.assignments.add(
            node_id=replicas.node,
            role=pb.ROLE_GENERATOR,
            accelerator_indices=indices(replicas.node, replicas.tp * replicas.count),
            tensor_parallel=replicas.tp,
            num_replicas=replicas.count,
            num_concurrent_samples=each.state.batch if each.state is not None else 0,
            share=rate / sum(rates),
        )
