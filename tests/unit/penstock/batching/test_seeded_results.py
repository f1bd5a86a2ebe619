"""What the users of the shared batch made of seeded work when each still had a batch of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.dispatch.queue_simulation import simulate
from benchmarks.dispatch.scenarios import make_scenario
from benchmarks.generator import concurrency
from benchmarks.scheduler.problems.emulated_machines import PROBLEM
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import Problem
from simulator.virtual_run.build_run import Mode
from simulator.virtual_run.simulation import Options, simulate_plan
from tests.helpers.plans.problems import plan


@pytest.mark.parametrize(
    ("fleet", "workload", "policy", "makespan_s"),
    [
        ("6 bound by KV", "reasoning", "fifo", 166.3576353643982),
        ("6 bound by KV", "short", "lpt", 1.372970820989131),
        ("2 big, 6 small", "short", "auto", 1.209),
    ],
)
def test_a_queue_is_decoded_in_the_same_time(fleet: str, workload: str, policy: str, makespan_s: float) -> None:
    scenario = make_scenario(fleet=fleet, workload=workload, forecast="good", num_groups=14, group_size=6, seed=5)
    assert simulate(scenario, policy).makespan_s == pytest.approx(makespan_s, rel=1e-9)


@pytest.mark.parametrize(("setting", "tokens_per_second"), [(None, 7759.125), (256, 6735.294117647059)])
def test_an_emulated_gpu_decodes_as_many_tokens(setting: int | None, tokens_per_second: float) -> None:
    workload = replace(concurrency.SMALL_WORKLOAD, num_samples=400)
    assert concurrency.simulate(workload, fixed=setting).tokens_per_second == pytest.approx(tokens_per_second, rel=1e-9)


def test_a_run_with_samples_that_move_reaches_the_same_rate() -> None:
    workload = {**PROBLEM["workload"], "staleness": 1}
    model = CostModel(Problem.model_validate({**PROBLEM, "workload": workload}))
    unlike = plan([("l40s-0", 1, 2), ("l4-0", 1, 1), ("l4-1", 1, 1)], [("head-0", 2)])
    outcome = simulate_plan(model, unlike, Options(mode=Mode.ASYNC, num_steps=41, skip=4))
    assert outcome.record.num_moves > 0
    assert outcome.samples_per_second == pytest.approx(11.062329609023584, rel=1e-9)
