"""Defines the command that simulates a plan: name, options and help. Imports nothing but typer until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import CostModel, PlanJson, Problem, command

app = typer.Typer()


@command(app)
def simulate(  # noqa: PLR0913, PLR0917 - one argument for each option
    problem: Problem,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan, or the output of `plan --json`. Default: a new plan.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="colocated_sync, disaggregated_sync, streaming, one_step or async.")
    ] = "async",
    cost_model: CostModel = "calibrated",
    steps: Annotated[int, typer.Option("--steps", min=2, max=100_000, help="Training steps.")] = 10,
    growth: Annotated[
        float, typer.Option("--growth", min=0, max=10, help="Growth of lengths per step, as a share of the first ones.")
    ] = 0.0,
    fail: Annotated[list[str] | None, typer.Option("--fail", metavar="MACHINE@S", help="A machine fails then.")] = None,
    join: Annotated[
        list[str] | None, typer.Option("--join", metavar="MACHINE@S", help="A machine is away until then.")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option("--slow", metavar="MACHINE@S:FACTOR", help="A machine's steps take FACTOR times as long."),
    ] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write the timeline to this SVG file.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=1_000_000, help="Seed of the lengths drawn.")] = 0,
    json_output: PlanJson = False,
) -> int:
    """Simulate a plan event by event on a virtual clock: samples generated, trained and lost, and waiting times.

    Nothing is started. The broker's own rules admit and batch; the scheduler's cost model supplies the durations.

    Examples:
      penstock simulate examples/two_sites.yaml
      penstock simulate examples/two_sites.yaml --mode streaming --picture timeline.svg
      penstock simulate examples/two_sites.yaml --fail l40s-1@200 --slow l40s-0@100:2
    """
    from console.plan.simulate_command import change_of, simulate_command

    named = (("fail", fail), ("join", join), ("slow", slow))
    return simulate_command(
        problem,
        plan_path=plan,
        cost_model=cost_model,
        mode=mode,
        num_steps=steps,
        growth=growth,
        seed=seed,
        changes=[change_of(text, kind) for kind, texts in named for text in texts or ()],
        picture=picture,
        is_json=json_output,
    )
