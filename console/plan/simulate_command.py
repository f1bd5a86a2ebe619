"""`penstock simulate`: what a plan does over time, event by event, on a virtual clock."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from services.scheduler.cost_model.calibrated import COST_MODELS, make_model
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import PlanDocument, read_plan
from services.scheduler.problem.problem import read_problem
from services.scheduler.solvers.interface import ProblemTooLargeError
from services.scheduler.solvers.registry import AUTO
from simulator.virtual_run.build_run import Mode, SetupError
from simulator.virtual_run.event_loop import Change
from simulator.virtual_run.simulation import Options, Outcome, document, simulate_plan

PLAN_BUDGET_S = 10.0
_LOOKS = 600
"""Points of the picture, about."""


def simulate_command(  # noqa: PLR0913 - one argument for each option
    path: Path,
    *,
    plan_path: Path | None,
    cost_model: str,
    mode: str,
    num_steps: int,
    growth: float,
    seed: int,
    changes: Sequence[Change],
    picture: Path | None,
    is_json: bool,
) -> int:
    """Simulate and print; exit status 1 when the plan cannot run. Raises ConfigError."""
    if cost_model not in COST_MODELS:
        raise ConfigError(f"--cost-model: {cost_model!r} is unknown; there is: {', '.join(COST_MODELS)}")
    if mode not in tuple(Mode):
        raise ConfigError(f"--mode: {mode!r} is unknown; there is: {', '.join(Mode)}")
    model = make_model(read_problem(path), cost_model)
    plan = read_plan(plan_path) if plan_path is not None else _made_plan(model, path)
    predicted = model.score(plan).samples_per_second
    look_s = None
    if picture is not None:
        look_s = num_steps * model.demand.samples_per_step / (predicted or 1.0) / _LOOKS
    options = Options(
        mode=Mode(mode),
        num_steps=num_steps,
        skip=min(2, num_steps - 1),
        seed=seed,
        growth_per_step=growth,
        changes=changes,
        look_s=look_s,
    )
    began_s = time.process_time()
    try:
        outcome = simulate_plan(model, plan, options)
    except (SetupError, RuntimeError) as error:
        raise ConfigError(f"{path}: this plan cannot run: {error}") from error
    except ValueError as error:
        raise ConfigError(f"--fail, --join, --slow: {error}") from error
    found = document(model, outcome, predicted=predicted if mode == Mode.ASYNC else None)
    found["cpu_s"] = time.process_time() - began_s
    if picture is not None:
        _draw(picture, found, outcome)
    print(json.dumps(found, indent=2) if is_json else "\n".join(_lines(found)))
    return 0


def change_of(text: str, kind: str) -> Change:
    """`MACHINE@SECONDS`, and for a slow one `MACHINE@SECONDS:FACTOR`. Raises ConfigError."""
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
    began_s = time.monotonic()
    try:
        solution = solve(model, AUTO, time_left=lambda: began_s + PLAN_BUDGET_S - time.monotonic())
    except ProblemTooLargeError as error:
        raise ConfigError(f"{path}: {error}; give a plan with --plan") from error
    if solution.plan is None:
        raise ConfigError(f"{path}: no plan can run: {getattr(solution.score, 'reason', 'none was found in time')}")
    return solution.plan


def _draw(path: Path, found: dict[str, Any], outcome: Outcome) -> None:
    from console.plan.simulate_picture import timeline

    title = f"{found['problem']}, {found['mode']}: {found['samples_per_second']:.4g} samples/s"
    path.write_text(timeline(title, outcome.record), encoding="utf-8")


def _lines(found: dict[str, Any]) -> list[str]:
    predicted = found["predicted_samples_per_second"]
    beside = f"; the cost model expects {predicted:.4g}" if predicted else ""
    books = found["audit"]
    ages = ", ".join(f"{age}: {count:,}" for age, count in found["staleness"].items())
    groups = f"{books['num_begun']:,} begun = {books['num_trained']:,} trained + {books['num_in_flight']:,} in flight"
    return [
        f"{found['problem']}, {found['mode']}, {found['num_steps']} steps, the first {found['num_skipped']} left out, "
        f"{found['num_generators']} generators, cost model {found['cost_model']}",
        f"{found['samples_per_second']:.4g} samples/s{beside}; {found['tokens_per_second']:,.0f} tokens/s, "
        f"a step in {found['step_s']:.4g} s",
        f"idle: generation {found['generation_idle']:.0%}, training {found['training_idle']:.0%}",
        f"samples trained on by staleness: {ages}; at most {found['max_staleness']} is allowed",
        f"groups: {groups}; {found['num_returned']:,} samples came back from lost machines",
        f"{found['virtual_s']:,.0f} s in {found['num_events']:,} events, {found['cpu_s']:.2f} s of CPU",
    ]
