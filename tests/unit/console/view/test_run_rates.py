"""What a run tells its scheduler of its trainers' speed."""

import pytest

from console.run.machine_report import run_rates
from console.view.run_view import RunView
from penstock.v1 import broker_pb2, trainer_pb2


def view(*engines, steps):
    """A run with generators of these engines, and steps of 32 samples that computed for so many seconds."""
    found = RunView(run_id="r", num_steps=100)
    for version, train_s in enumerate(steps, start=1):
        metrics = {"step/samples": 32.0, "time/train_s": train_s, "time/step_s": 10 * train_s}
        found.add_step(trainer_pb2.StepReport(policy_version=version, metrics=metrics), time_s=float(version))
    generators = [broker_pb2.GeneratorView(hello=broker_pb2.GeneratorHello(engine=engine)) for engine in engines]
    found.set_run(broker_pb2.GetRunResponse(generators=generators))
    return found


def test_the_rate_is_that_of_computing_and_one_odd_step_does_not_move_it():
    (rate,) = run_rates(view("vllm", steps=[2.0, 50.0, 2.0]), "r")
    assert (rate.samples_per_second, rate.run_id) == (16.0, "r")


@pytest.mark.parametrize(
    ("engines", "steps", "run_id"),
    [
        (["vllm"], [2.0, 2.0], "r"),
        (["vllm", "emulated"], [2.0] * 3, "r"),
        ([], [2.0] * 3, "r"),
        (["vllm"], [2.0] * 3, ""),
    ],
    ids=["too few steps", "emulated GPUs", "nothing known of generators", "no plan"],
)
def test_rates_without_meaning_for_the_plans_machines_are_not_reported(engines, steps, run_id):
    assert run_rates(view(*engines, steps=steps), run_id) == []
