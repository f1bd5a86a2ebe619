"""Lists the solvers by the names that `--solver` takes. A new one is a file beside this one and a line here.

Solvers are imported on first use, so that the command line lists the names at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.solvers.interface import Solver

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered solver."""

    path: str
    """`module:class`; the class is constructed without arguments."""
    auto_share: float | None = None
    """Share of all the time that its turn of `auto` may take; None if it has none."""


SOLVERS: dict[str, Entry] = {
    AUTO: Entry("services.scheduler.solvers.portfolio:AutoSolver"),
    "partition": Entry("services.scheduler.solvers.partition:PartitionSolver", auto_share=0.125),
    "streamrl": Entry("services.scheduler.solvers.streamrl_allocation:StreamRlSolver", auto_share=0.125),
    "exhaustive": Entry("services.scheduler.solvers.exhaustive:ExhaustiveSolver", auto_share=0.5),
    "multilevel": Entry("services.scheduler.solvers.multilevel:MultilevelSolver", auto_share=0.125),
    "milp": Entry("services.scheduler.solvers.milp:MilpSolver", auto_share=0.125),
}


def members() -> dict[str, float]:
    """Those that `auto` gives a turn and their shares, in order: first the one that may prove its plan."""
    found = ((name, entry.auto_share) for name, entry in SOLVERS.items() if entry.auto_share is not None)
    return dict(sorted(found, key=lambda each: each[0] != "exhaustive"))


def make_solver(name: str) -> Solver:
    """The named solver, one of SOLVERS."""
    solver: Solver = resolve_name(SOLVERS[name].path)()
    return solver
