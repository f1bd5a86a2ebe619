"""A solver from outside: one entry in the registry, and every way to plan knows it."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from console.cli import app
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_wire import checked_task
from services.scheduler.planning.solve import solve
from services.scheduler.solvers.interface import Solution
from services.scheduler.solvers.registry import AUTO, SOLVERS, Entry, make_solver
from tests.helpers.console import environment
from tests.helpers.plans.problems import INSTANCES, document, plan, problem

HALVES = plan([("h20-0", 1, 8)], [("h800-0", 8)])


class Toy:
    """Each machine does one thing."""

    name = "toy"

    def solve(self, model, *, time_left, seed, starts):
        return Solution(HALVES, model.score(HALVES), None, True, 1, self.name)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(SOLVERS, "toy", Entry(f"{__name__}:Toy", auto_share=0.5))


def test_each_solver_goes_by_its_name():
    assert {name: make_solver(name).name for name in SOLVERS} == {name: name for name in SOLVERS}


@pytest.mark.usefixtures("toy")
def test_a_registered_solver_plans_for_programs_and_on_the_command_line():
    solution = solve(CostModel(problem("tiny_02")), "toy", time_left=lambda: 60.0)
    assert (solution.plan, solution.solver) == (HALVES, "toy")

    result = CliRunner().invoke(
        app, ["plan", str(INSTANCES / "tiny_02.json"), "--solver", "toy", "--budget-s", "1", "--json"]
    )
    answer = json.loads(result.output)
    center = {"broker": {"node": HALVES.train[0].node}, "scheduler": HALVES.train[0].node}
    assert (answer["rm1_plan"], answer["solver"]) == ({**HALVES.stated(), **center}, "toy")
    refused = CliRunner().invoke(app, ["plan", str(INSTANCES / "tiny_02.json"), "--solver", "oracle"])
    assert "choose one of auto, partition, streamrl, exhaustive, multilevel, milp, toy" in refused.output
    asked = pb.CreatePlanRequest(problem_json=json.dumps(document("tiny_02")), solver="toy")
    task = checked_task(asked, cost_model="rm1")
    assert (task.problem, task.solver) == (problem("tiny_02"), "toy")


def test_auto_asks_its_members():
    toy = Entry(f"{__name__}:Toy", auto_share=0.5)
    with patch.dict(SOLVERS, {"idle": Entry("nowhere:Nothing"), "toy": toy}, clear=True):
        solution = solve(CostModel(problem("tiny_02")), AUTO, time_left=lambda: 60.0)
    assert (solution.plan, solution.solver, solution.num_evaluated) == (HALVES, "toy", 1)


def test_help_names_the_registered_solvers():
    program = (
        "from services.scheduler.solvers.registry import SOLVERS, Entry\n"
        "SOLVERS['toy'] = Entry('nowhere:Toy')\n"
        "from console.cli import main; import sys; sys.argv = ['penstock', 'plan', '--help']; main()"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True, env=environment()
    )
    assert f"One of {AUTO}, partition, streamrl, exhaustive, multilevel, milp, toy." in " ".join(done.stdout.split())
