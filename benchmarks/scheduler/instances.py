"""Checks that `penstock plan` and `penstock simulate` give complete answers to every given problem.

penstock bench scheduler.instances PROBLEM... [--budget-s S] [--bounds "python3 plan_bound.py"]

For each problem: a plan as JSON (all keys present), its picture and deployment, the plan explained in words, and that
plan simulated with a picture. With `--bounds`, the command of a program independent of this project (`--eval`,
`--bracket`), the plan's share of its upper bound, and over the best of its simple planners. Exits with 1 if anything is
missing or a simple planner is better.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PLAN_KEYS = (
    "samples_per_second",
    "tokens_per_second",
    "usd_per_hour",
    "usd_per_million_tokens",
    "upper_bound_samples_per_second",
    "gap",
    "solver",
    "solve_s",
    "rm1_plan",
    "bottleneck",
    "generation_idle",
    "training_idle",
    "next_purchases",
    "alternatives",
)
SIMULATE_KEYS = ("samples_per_second", "predicted_samples_per_second", "generation_idle", "training_idle", "audit")
_DEADLINE_S = 1800
_TIE = 1e-3
"""A smaller shortfall against the simple planners is a rounding of their counts."""


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one problem."""

    cells: tuple[str, ...]
    is_good: bool


def check(problem: Path, *, budget_s: float, bounds: Sequence[str], folder: Path) -> Row:
    """Run all commands on one problem."""
    plan, picture, deployed = (folder / f"{problem.stem}{end}" for end in (".json", ".svg", ".d"))
    stated = ["plan", str(problem), "--budget-s", f"{budget_s:g}"]
    done = _penstock(*stated, "--json", "--picture", str(picture), "--deploy", str(deployed))
    document = json.loads(done.stdout)
    if done.returncode == 1 and document["reason"]:
        return Row((problem.stem, f"none: {document['reason']}", *("-",) * 5), is_good=True)
    plan.write_text(done.stdout, encoding="utf-8")
    missing = [key for key in PLAN_KEYS if document.get(key) is None]
    is_written = picture.stat().st_size > 0 and any(deployed.rglob("docker-compose.yml"))
    explained = _penstock(*stated, "--explain", "--start", str(plan))
    timeline = folder / f"{problem.stem}-timeline.svg"
    simulated = _penstock("simulate", str(problem), "--plan", str(plan), "--json", "--picture", str(timeline))
    run = json.loads(simulated.stdout) if simulated.returncode == 0 else {}
    missing += [key for key in SIMULATE_KEYS if run.get(key) is None]
    is_good = not (done.returncode or explained.returncode or missing) and is_written and timeline.stat().st_size > 0
    judged, is_above = _judged(problem, plan, bounds)
    cells = (
        problem.stem,
        "all there" if is_good else f"missing: {', '.join(missing) or 'files'}",
        f"{document['samples_per_second']:.4g} ({document['solver']}, {document['solve_s']:.1f} s)",
        f"{1 - document['gap']:.4f}" if document["gap"] is not None else "-",
        *judged,
        f"{run['samples_per_second'] / run['predicted_samples_per_second']:.2f}" if run else "-",
    )
    return Row(cells, is_good and is_above and bool(run["audit"]["is_balanced"]))


def _judged(problem: Path, plan: Path, bounds: Sequence[str]) -> tuple[tuple[str, str], bool]:
    """Share of the independent bound, ratio to the best simple planner, and whether the plan is no worse than that."""
    if not bounds:
        return ("-", "-"), True
    alone = plan.with_suffix(".plan")
    alone.write_text(json.dumps(json.loads(plan.read_text(encoding="utf-8"))["rm1_plan"]), encoding="utf-8")
    command = [*bounds, "--json", "--bracket", "--eval", str(alone), str(problem)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    (found,) = json.loads(done.stdout)
    simple = max(found["plans"][name] or 0.0 for name in ("descent", "three_quarters", "whole_types"))
    above = found["plan_T"] / simple
    return (f"{1 - found['plan_gap']:.4f}", f"{above:.4f}"), above >= 1 - _TIE


def _penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "console", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr}")
    return done


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=Path)
    parser.add_argument("--budget-s", type=float, default=20)
    parser.add_argument("--bounds", type=shlex.split, default=[])
    options = parser.parse_args()
    titles = ("problem", "answers", "samples/s", "of own bound", "of that bound", "over simple", "simulated")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    is_good = True
    with tempfile.TemporaryDirectory() as folder:
        for problem in options.problems:
            row = check(problem, budget_s=options.budget_s, bounds=options.bounds, folder=Path(folder))
            print(f"| {' | '.join(row.cells)} |", flush=True)
            is_good = is_good and row.is_good
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
