"""Implements `penstock plan`: which GPUs of a cluster generate and which train, and the resulting throughput."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from console.plan.build_problem import Sources, build_problem, write_problem
from console.plan.picture_file import write_picture
from console.plan.plan_picture import plan_picture
from console.plan.plan_text import print_plan
from penstock.config import ConfigError, read_document
from services.scheduler.cost_model.calibrated import make_model
from services.scheduler.cost_model.reference import Infeasible
from services.scheduler.planning.plan_report import FeasiblePlan, PlanReport, report_json
from services.scheduler.planning.solve import make_advised_plan
from services.scheduler.problem.plan_document import placement_error, read_plan
from services.scheduler.problem.problem import Problem, read_problem
from services.scheduler.solvers.interface import ProblemTooLargeError
from services.scheduler.solvers.registry import SOLVERS
from simulator.virtual_run.simulation import steady_rate

EXIT_INFEASIBLE = 1

_SMALL_GPUS, _SMALL_BUDGET_S = 64, 14.0
_LARGE_GPUS, _LARGE_BUDGET_S = 1024, 45.0


def default_budget_s(num_gpus: int) -> float:
    """Time to plan a cluster, seconds: the same up to 64 GPUs, from there with each doubling more, up to 1,024."""
    doublings = math.log2(min(max(num_gpus, _SMALL_GPUS), _LARGE_GPUS) / _SMALL_GPUS)
    each_s = (_LARGE_BUDGET_S - _SMALL_BUDGET_S) / math.log2(_LARGE_GPUS / _SMALL_GPUS)
    return _SMALL_BUDGET_S + each_s * doublings


def stated_problem(path: Path | None, sources: Sources) -> Problem:
    """The problem in a file, or one built from an inventory, and written if a file is named. Raises ConfigError."""
    inventory = sources.inventory
    if (path is None) is (inventory is None):
        raise ConfigError(
            "PROBLEM: name a problem's file, or a folder of probes with --inventory"
            if path is None
            else f"--inventory: {path} states the cluster; leave out one of the two"
        )
    if path is not None:
        if sources.unused:
            raise ConfigError(
                f"{sources.unused[0]}: has no effect on {path}; leave it out, or name --inventory instead"
            )
        return read_problem(path)
    assert inventory is not None
    built = build_problem(inventory, sources)
    for note in built.notes:
        print(f"note: {note}", file=sys.stderr)
    if (file := sources.write_problem) is not None:
        write_problem(file, built)
        print(f"written to {file}; penstock plan {file} plans it again", file=sys.stderr)
    return built.problem


def plan_problem(
    problem: Problem,
    *,
    solver: str,
    cost_model: str,
    budget_s: float | None,
    seed: int,
    start: Path | None,
    is_deployed: bool = False,
) -> PlanReport:
    """Plan a problem. Raises ConfigError.

    Args:
        problem: It.
        solver: One of SOLVERS.
        cost_model: Its name.
        budget_s: Time for everything; None for what clusters of this size get by default.
        seed: Of the search.
        start: The initial plan.
        is_deployed: Whether files that start the plan will be written: then a `start` of other machines is refused.
    """
    if solver not in SOLVERS:
        raise ConfigError(f"--solver: {solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
    model = make_model(problem, cost_model)
    for region in problem.unlinked_regions:
        print(
            f"note: no link joins region {region!r} with another, so a plan has machines there or elsewhere, not both; "
            "state one in links (penstock probe --with measures it)",
            file=sys.stderr,
        )
    starts = () if start is None else (read_plan(start),)
    for plan in starts:
        if is_deployed and (reason := placement_error(plan, model.nodes, model.hosts)) is not None:
            raise ConfigError(
                f"--start: {start}: {reason}, so what --deploy wrote would be another plan; leave --start out, or plan "
                "for the machines that it names"
            )
        if isinstance(score := model.score(plan), Infeasible):
            print(
                f"note: {start} cannot run on these machines ({score.reason}); the plan is made without it",
                file=sys.stderr,
            )
    if budget_s is None:
        budget_s = default_budget_s(sum(node.gpus * node.count for node in problem.nodes))
    end_s = time.monotonic() + budget_s
    try:
        return make_advised_plan(
            model, solver, time_left=lambda: end_s - time.monotonic(), simulate=steady_rate, seed=seed, starts=starts
        )
    except ProblemTooLargeError as error:
        raise ConfigError(f"{problem.id}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What `--deploy` and the options beside it say."""

    folder: Path | None
    """None where nothing is deployed."""
    engine: str
    run: Path | None
    address: str | None
    head_address: str | None
    moves_trainer: bool


def write_files(report: PlanReport, *, picture: Path | None, deployment: Deployment) -> None:
    """Write what was asked for of a plan that can run. Raises ConfigError."""
    if isinstance(report, FeasiblePlan):
        if picture is not None:
            write_picture(picture, plan_picture(report))
        if deployment.folder is not None:
            _deploy(report, deployment.folder, deployment)


def _deploy(report: FeasiblePlan, folder: Path, deployment: Deployment) -> None:
    """Write the files that start the plan; see `console.deploy.deployment.write_deployment`. Raises ConfigError."""
    from console.deploy.configurations import PLAIN_RUN
    from console.deploy.deployment import write_deployment
    from console.deploy.trainers import training_machines

    model, plan, address = report.model, report.plan, deployment.address
    stated = read_document(deployment.run) if deployment.run is not None else PLAIN_RUN
    written = write_deployment(
        folder,
        model,
        plan,
        engine=deployment.engine,
        run=stated,
        address=address,
        head_address=deployment.head_address,
        moves_trainer=deployment.moves_trainer,
    )
    print(f"{len(written)} files in {folder}; its README.md says how to start them", file=sys.stderr)
    if deployment.engine == "compose":
        machines = training_machines(model, plan, address=address, moves=deployment.moves_trainer)
        for each in (each for each in machines if each.torchrun):
            command = " ".join(("torchrun", *each.torchrun, "-m console serve trainer --config"))
            print(
                f"note: without containers, {each.name} trains by: {command} {each.site}/trainer.yaml", file=sys.stderr
            )


def show(report: PlanReport, *, is_json: bool, is_explained: bool) -> int:
    """Print the plan; exit status 1 if no plan can run."""
    if is_json:
        print(report_json(report))
    elif isinstance(report, FeasiblePlan):
        print_plan(report, is_explained=is_explained)
    else:
        print(f"{report.model.problem.id}: no plan can run: {report.reason}", file=sys.stderr)
    return 0 if isinstance(report, FeasiblePlan) else EXIT_INFEASIBLE
