"""`penstock plan`: who generates and who trains on a cluster that a file describes, and what that would achieve."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.plan.plan_picture import plan_picture
from console.plan.plan_text import print_plan
from penstock.config import ConfigError, read_document
from services.scheduler.cost_model.calibrated import COST_MODELS, make_model
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import advice, plan_document, solve
from services.scheduler.problem.plan_document import PlanDocument, read_plan
from services.scheduler.problem.problem import read_problem
from services.scheduler.solvers.interface import ProblemTooLargeError
from services.scheduler.solvers.registry import SOLVERS
from simulator.virtual_run.simulation import steady_rate

EXIT_INFEASIBLE = 1
_SOLVE_SHARE = 0.8
_SIMULATED_SHARE = 0.9
"""Of the time, until when the plan is sought and then simulated; the rest looks for what to buy or give up next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line says beside the problem."""

    solver: str = "auto"
    cost_model: str = "rm1"
    budget_s: float = 30.0
    seed: int = 0
    is_json: bool = False
    is_explained: bool = False
    start: Path | None = None
    """A plan to begin with: of a run that is under way."""
    picture: Path | None = None
    """An SVG file to draw the plan into."""
    deploy: Path | None = None
    """A folder to write what starts the plan into."""
    run: Path | None = None
    """The configuration of the run that is deployed."""
    address: str | None = None
    """Reaches every machine of the deployment; each is reached under its own name when None."""


def plan_command(path: Path, options: PlanOptions) -> int:
    """Plan, and print the plan; exit status 1 when none can run. Raises ConfigError."""
    for key, value, known in (
        ("--solver", options.solver, tuple(SOLVERS)),
        ("--cost-model", options.cost_model, COST_MODELS),
    ):
        if value not in known:
            raise ConfigError(f"{key}: {value!r} is unknown; there is: {', '.join(known)}")
    model = make_model(read_problem(path), options.cost_model)
    try:
        document = _planned(model, options)
    except ProblemTooLargeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if document["is_feasible"] and options.picture is not None:
        options.picture.write_text(plan_picture(model, document), encoding="utf-8")
    if document["is_feasible"] and options.deploy is not None:
        _deploy(options.deploy, model, PlanDocument.model_validate(document["rm1_plan"]), options)
    if options.is_json:
        print(json.dumps(document, indent=2))
    elif document["is_feasible"]:
        print_plan(model, document, is_explained=options.is_explained)
    else:
        print(f"{document['problem']}: no plan can run: {document['reason']}", file=sys.stderr)
    return 0 if document["is_feasible"] else EXIT_INFEASIBLE


def _deploy(folder: Path, model: CostModel, plan: PlanDocument, options: PlanOptions) -> None:
    from console.deploy.deployment import PLAIN_RUN, write_deployment
    from console.deploy.trainers import training_machines

    run = read_document(options.run) if options.run is not None else PLAIN_RUN
    written = write_deployment(folder, model, plan, run=run, address=options.address)
    print(f"{len(written)} files in {folder}; docs/planning.md says how to start them", file=sys.stderr)
    if len(plan.train) > 1:
        address = options.address or plan.train[0].node
        for each in training_machines(model, plan, address):
            command = " ".join(("torchrun", *each.torchrun, "-m console serve trainer --config"))
            print(
                f"note: without containers, {each.name} trains by: {command} {each.site}/trainer.yaml", file=sys.stderr
            )


def _planned(model: CostModel, options: PlanOptions) -> dict[str, Any]:
    starts = () if options.start is None else (read_plan(options.start),)
    began_s = time.monotonic()

    def left_of(share: float) -> float:
        return began_s + share * options.budget_s - time.monotonic()

    solution = solve(model, options.solver, time_left=lambda: left_of(_SOLVE_SHARE), seed=options.seed, starts=starts)
    document = plan_document(model, solution, solve_s=time.monotonic() - began_s)
    if solution.plan is not None:
        rate = steady_rate(model, solution.plan, time_left=lambda: left_of(_SIMULATED_SHARE), seed=options.seed)
        document["simulated_samples_per_second"] = rate
    return document | advice(model, solution, time_left=lambda: left_of(1.0), seed=options.seed)
