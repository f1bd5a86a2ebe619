"""`penstock plan`: who generates and who trains on a cluster that a file describes, and what that would achieve."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from services.scheduler.cost_model.calibrated import CALIBRATED, COST_MODELS, make_model
from services.scheduler.cost_model.rm1 import RM1, Rm1
from services.scheduler.planning import SOLVERS, plan_document, solve
from services.scheduler.problem import read_problem
from services.scheduler.solvers.interface import ProblemTooLargeError

EXIT_INFEASIBLE = 1
_LIMITS = {
    "generation": "generation limits: trainers wait for samples",
    "training": "training limits: generators wait for the trainer",
    "tail": "the longest samples limit: they must finish inside their staleness window",
}
_COST_MODELS = {
    RM1: "reference cost model RM-1, which is optimistic by 1.1 to 2.2 times",
    CALIBRATED: "calibrated cost model, 0.76 to 1.24 times what nine published runs measured",
}


def plan_command(path: Path, *, solver: str, cost_model: str, budget_s: float, seed: int, is_json: bool) -> int:
    """Plan, and print the plan; exit status 1 when none can run. Raises ConfigError."""
    if solver not in SOLVERS:
        raise ConfigError(f"--solver: {solver!r} is unknown; there is: {', '.join(SOLVERS)}")
    if cost_model not in COST_MODELS:
        raise ConfigError(f"--cost-model: {cost_model!r} is unknown; there is: {', '.join(COST_MODELS)}")
    rm1 = make_model(read_problem(path), cost_model)
    began_s = time.monotonic()
    try:
        solution = solve(rm1, solver, time_left=lambda: began_s + budget_s - time.monotonic(), seed=seed)
    except ProblemTooLargeError as error:
        raise ConfigError(f"{path}: {error}") from error
    document = plan_document(rm1, solution, solve_s=time.monotonic() - began_s)
    if is_json:
        print(json.dumps(document, indent=2))
    elif document["is_feasible"]:
        _print_plan(rm1, document)
    else:
        print(f"{document['problem']}: no plan can run: {document['reason']}", file=sys.stderr)
    return 0 if document["is_feasible"] else EXIT_INFEASIBLE


def _print_plan(rm1: Rm1, document: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=document["problem"], box=box.SIMPLE)
    for heading in ("machines", "GPU", "does", "sequences", "samples/s", "fresh"):
        table.add_column(heading, justify="left" if heading in ("machines", "GPU", "does") else "right")
    for (_, *cells), machines in _rows(rm1, document).items():
        shown = machines[0] if len(machines) == 1 else f"{machines[0]} and {len(machines) - 1} like it"
        table.add_row(shown, rm1.nodes[machines[0]].gpu, *cells)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    for line in _lines(document):
        print(line)


def _rows(rm1: Rm1, document: dict[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """Machines that do the same, by what they do."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for share in document["rm1_plan"]["train"]:
        name = rm1.nodes[share["node"]].name
        rows.setdefault(
            (name, f"train, {share['gpus']} of {rm1.nodes[share['node']].gpus} GPUs", "", "", ""), []
        ).append(share["node"])
    for each in document["generation"]:
        does = f"generate, {each['count']} x tensor parallel {each['tp']}"
        cells = (does, f"{each['batch']}", f"{each['samples_per_second']:.3g}", f"{each['duty']:.0%}")
        rows.setdefault((rm1.nodes[each["node"]].name, *cells), []).append(each["node"])
    return rows


def _lines(document: dict[str, Any]) -> list[str]:
    bound = document["upper_bound_samples_per_second"]
    if document["is_optimal"]:
        quality = "optimal: no other plan of this kind is faster"
    else:
        quality = f"at most {bound:.4g} samples/s is possible, gap {document['gap']:.1%}" if bound else "no bound"
    return [
        f"{document['samples_per_second']:.4g} samples/s, {document['tokens_per_second']:,.0f} tokens/s, "
        f"a step in {document['step_s']:.4g} s (training {document['training']['step_s']:.4g} s)",
        f"${document['usd_per_hour']:.2f} an hour, ${document['usd_per_million_tokens']:.3g} per million tokens",
        f"{_LIMITS[document['limit']]}; idle: generation {document['generation_idle']:.0%}, "
        f"training {document['training_idle']:.0%}",
        f"{quality} ({document['solver']}, {document['num_evaluated']} plans scored, {document['solve_s']:.2f} s; "
        f"{_COST_MODELS[document['cost_model']]})",
    ]
