"""Implements `penstock plan`: which GPUs of a cluster generate and which train, and the resulting throughput."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from console.plan.plan_text import print_plan
from penstock.config import ConfigError, read_document
from services.scheduler.cost_model.calibrated import make_model
from services.scheduler.planning.plan_report import FeasiblePlan, PlanReport, report_json
from services.scheduler.planning.solve import make_advised_plan
from services.scheduler.problem.plan_document import read_plan
from services.scheduler.problem.problem import read_problem
from services.scheduler.solvers.interface import ProblemTooLargeError
from services.scheduler.solvers.registry import SOLVERS
from simulator.virtual_run.simulation import steady_rate

EXIT_INFEASIBLE = 1


def plan_file(
    path: Path, *, solver: str, cost_model: str, budget_s: float, seed: int, start: Path | None
) -> PlanReport:
    """Plan the problem in a file; `start` is the initial plan. Raises ConfigError."""
    if solver not in SOLVERS:
        raise ConfigError(f"--solver: {solver!r} is unknown; there is: {', '.join(SOLVERS)}")
    model = make_model(read_problem(path), cost_model)
    starts = () if start is None else (read_plan(start),)
    end_s = time.monotonic() + budget_s
    try:
        return make_advised_plan(
            model, solver, time_left=lambda: end_s - time.monotonic(), simulate=steady_rate, seed=seed, starts=starts
        )
    except ProblemTooLargeError as error:
        raise ConfigError(f"{path}: {error}") from error


def deploy(
    folder: Path, report: FeasiblePlan, *, engine: str, run: Path | None, address: str | None, head_address: str | None
) -> None:
    """Write the files that start the plan; see `console.deploy.deployment.write_deployment`. Raises ConfigError."""
    from console.deploy.configurations import PLAIN_RUN
    from console.deploy.deployment import write_deployment
    from console.deploy.trainers import training_machines

    model, plan = report.model, report.plan
    stated = read_document(run) if run is not None else PLAIN_RUN
    written = write_deployment(
        folder, model, plan, engine=engine, run=stated, address=address, head_address=head_address
    )
    print(f"{len(written)} files in {folder}; its README.md says how to start them", file=sys.stderr)
    if len(plan.train) > 1 and engine == "compose":
        for each in training_machines(model, plan, address or plan.train[0].node):
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
