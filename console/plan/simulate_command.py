"""Implements `penstock simulate`: runs a plan event by event on a virtual clock."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from console.plan.picture_file import check_picture, write_picture
from penstock.config import ConfigError
from services.scheduler.cost_model.calibrated import make_model
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_report import FeasiblePlan
from services.scheduler.planning.solve import make_plan
from services.scheduler.problem.plan_document import PlanDocument, read_plan
from services.scheduler.problem.problem import read_problem
from services.scheduler.solvers.registry import AUTO
from simulator.virtual_run.build_run import Mode, SetupError
from simulator.virtual_run.event_loop import Change, Options
from simulator.virtual_run.simulation import SimulationReport, report_of, simulate_plan

PLAN_BUDGET_S = 10.0
_LOOKS = 600
"""Approximate number of points in the picture."""


def simulate_command(
    path: Path, options: Options, *, plan_path: Path | None, cost_model: str, picture: Path | None, is_json: bool
) -> int:
    """Simulate and print; exit status 1 if the plan cannot run. Raises ConfigError."""
    check_picture(picture)
    model = make_model(read_problem(path), cost_model)
    plan = read_plan(plan_path) if plan_path is not None else _made_plan(model, path)
    predicted = model.score(plan).samples_per_second
    if picture is not None:
        expected_s = options.num_steps * model.demand.samples_per_step / (predicted or 1.0)
        options = replace(options, look_s=expected_s / _LOOKS)
    began_s = time.process_time()
    try:
        run = simulate_plan(model, plan, options)
    except (SetupError, RuntimeError) as error:
        raise ConfigError(f"{path}: this plan cannot run: {error}") from error
    except ValueError as error:
        raise ConfigError(f"--fail, --join, --slow: {error}") from error
    cpu_s = time.process_time() - began_s
    report = report_of(model, run, predicted=predicted if options.mode is Mode.ASYNC else None, cpu_s=cpu_s)
    if picture is not None:
        from console.plan.simulate_picture import timeline

        title = f"{report.problem}, {report.mode}: {report.samples_per_second:.4g} samples/s"
        write_picture(picture, timeline(title, run.record))
    print(json.dumps(asdict(report), indent=2) if is_json else "\n".join(_lines(report)))
    return 0


def mode_of(text: str) -> Mode:
    """Parse the name of a mode. Raises ConfigError."""
    if text not in tuple(Mode):
        raise ConfigError(f"--mode: {text!r} is unknown; choose one of {', '.join(Mode)}")
    return Mode(text)


def change_of(text: str, kind: str) -> Change:
    """Parse `MACHINE@SECONDS`, or `MACHINE@SECONDS:FACTOR` for a slow machine. Raises ConfigError."""
    node, _, rest = text.rpartition("@")
    at, _, factor = rest.partition(":")
    try:
        change = Change(float(at), node, kind, float(factor) if factor else 1.0)
    except ValueError:
        change = None
    is_slow = kind == "slow"
    if (
        change is None
        or not node
        or not 0 <= change.at_s < 1e9
        or is_slow != bool(factor)
        or not 0 < change.factor < 1e6
    ):
        form = "MACHINE@SECONDS:FACTOR" if is_slow else "MACHINE@SECONDS"
        raise ConfigError(f"--{kind}: {text!r} is not {form}")
    return change


def _made_plan(model: CostModel, path: Path) -> PlanDocument:
    end_s = time.monotonic() + PLAN_BUDGET_S
    report = make_plan(model, AUTO, time_left=lambda: end_s - time.monotonic())
    if not isinstance(report, FeasiblePlan):
        raise ConfigError(f"{path}: no plan can run: {report.reason or 'none was found in time'}")
    return report.plan


def _lines(report: SimulationReport) -> list[str]:
    predicted = report.predicted_samples_per_second
    beside = f"; the cost model expects {predicted:.4g}" if predicted else ""
    books = report.audit
    ages = ", ".join(f"{age}: {count:,}" for age, count in report.staleness.items())
    groups = f"{books['num_begun']:,} begun = {books['num_trained']:,} trained + {books['num_in_flight']:,} in flight"
    return [
        f"{report.problem}, {report.mode}, {report.num_steps} steps, the first {report.num_skipped} left out, "
        f"{report.num_generators} generators, cost model {report.cost_model}",
        f"{report.samples_per_second:.4g} samples/s{beside}; {report.tokens_per_second:,.0f} tokens/s, "
        f"a step in {report.step_s:.4g} s",
        f"idle: generation {report.generation_idle:.0%}, training {report.training_idle:.0%}",
        f"samples trained on by staleness: {ages}; at most {report.max_staleness} is allowed",
        f"groups: {groups}; {report.num_returned:,} samples came back from lost machines",
        f"{report.virtual_s:,.0f} s in {report.num_events:,} events, {report.cpu_s:.2f} s of CPU",
    ]
