"""Defines the planning commands: names, options and help. Imports nothing but typer until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import CostModel, PlanJson, Problem, command
from services.scheduler.solvers.registry import AUTO, SOLVERS

app = typer.Typer()


@command(app)
def plan(  # noqa: PLR0913, PLR0917 - a command's options are its signature
    problem: Problem,
    solver: Annotated[str, typer.Option("--solver", help=f"One of {', '.join(SOLVERS)}.")] = AUTO,
    cost_model: CostModel = "rm1",
    budget_s: Annotated[float, typer.Option("--budget-s", min=0.1, max=86_400, help="Time to search, seconds.")] = 30,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.")] = 0,
    json_output: PlanJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show how the time is spent, and every offer.")] = False,
    start: Annotated[
        Path | None, typer.Option("--start", metavar="PLAN", help="Initial plan, such as the running one.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw placement and timeline into a file.")
    ] = None,
    deploy: Annotated[
        Path | None,
        typer.Option("--deploy", metavar="DIR", help="Write compose files and configurations that start the plan."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.yaml", help="With --deploy: the run whose model and data to use."),
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="With --deploy: address of all machines, to try the plan on one.")
    ] = None,
) -> int:
    """Plan which machines of a mixed cluster generate and which train, and show the expected throughput.

    Nothing is started. Exit status 1 if no plan can run; the reason is printed.

    Examples:
      penstock plan examples/two_sites.yaml
      penstock plan examples/two_sites.yaml --solver exhaustive --json
      penstock plan examples/two_sites.yaml --explain --picture plan.svg
    """
    from console.plan.plan_command import deploy as write
    from console.plan.plan_command import plan_file, show
    from console.plan.plan_picture import plan_picture
    from services.scheduler.planning.plan_report import FeasiblePlan

    report = plan_file(problem, solver=solver, cost_model=cost_model, budget_s=budget_s, seed=seed, start=start)
    if isinstance(report, FeasiblePlan):
        if picture is not None:
            picture.write_text(plan_picture(report), encoding="utf-8")
        if deploy is not None:
            write(deploy, report, run=run, address=address)
    return show(report, is_json=json_output, is_explained=explain)
