"""The calibrated cost model: its constants are what the published rows give, and it is nearer to them than RM-1."""

import math

import pytest

from benchmarks.scheduler import calibration
from benchmarks.scheduler.cost_model import fitting
from benchmarks.scheduler.cost_model.published import decode_rows, generation_rows, held_out_rows, run_rows
from services.scheduler.cost_model.calibrated import (
    ALLREDUCE_OVERHEAD_S,
    ATTENTION_EFFICIENCY,
    CALIBRATED,
    DECODING,
    TRAINER_DUTY,
    calibrated,
    make_model,
)
from services.scheduler.cost_model.reference import CostModel
from tests.helpers.plans.problems import plan, problem

SPLIT = plan([("h20-0", 1, 8)], [("h800-0", 8)])


@pytest.mark.slow
def test_the_constants_are_those_that_the_fit_gives():
    assert fitting.fit_decoding() == pytest.approx(dict(DECODING), rel=0.03)
    assert fitting.fit_allreduce(calibration.CONSTANTS) == pytest.approx(ALLREDUCE_OVERHEAD_S, rel=0.03)
    assert fitting.fit_attention() == pytest.approx(ATTENTION_EFFICIENCY, rel=0.03)
    assert fitting.fit_duty(calibration.CONSTANTS) == pytest.approx(TRAINER_DUTY, rel=0.03)


@pytest.mark.parametrize("rows", [decode_rows(), generation_rows(), run_rows()], ids=["decoding", "generation", "runs"])
def test_it_is_nearer_to_what_was_published_than_rm1(rows):
    def error(constants) -> float:
        return sum(math.log(row.predict(constants) / row.measured) ** 2 for row in rows)

    assert error(calibration.CONSTANTS) < 0.4 * error(calibration.RM1_CONSTANTS)


def test_no_published_row_is_missed_by_more_than_a_third():
    for row in [*decode_rows(), *held_out_rows(), *generation_rows(), *run_rows()]:
        assert 0.75 < row.predict(calibration.CONSTANTS) / row.measured < 1.36, row.name


def test_an_all_reduce_costs_only_where_there_is_one():
    given = problem("tiny_02")
    costly = given.model_copy(update={"cost_model": given.cost_model.model_copy(update={"allreduce_overhead_s": 1e-3})})
    one, other = CostModel(given), CostModel(costly)
    node, layers = one.nodes["h20-0"], given.model.layers

    assert one.replica(node, 1) == other.replica(node, 1)
    assert other.replica(node, 4).step_s - one.replica(node, 4).step_s == pytest.approx(2e-3 * layers)


def test_it_replaces_constants_and_keeps_how_a_run_is_set_up():
    given = problem("tiny_02", "cost_model.sync_pause_s=7", "cost_model.max_num_seqs=99", "cost_model.eta_bw=0.1")

    fitted = calibrated(given).cost_model

    assert (fitted.sync_pause_s, fitted.max_num_seqs) == (7, 99)
    assert fitted.eta_bw == DECODING["eta_bw"]
    assert fitted.mfu("H800", "train") == fitted.mfu("H800", "infer") < fitted.mfu("A100-80", "train")


def test_a_measured_rate_still_replaces_what_is_computed():
    trainer = "{gpu: H800, role: trainer, tokens_per_second: 100}"
    generator = "{gpu: H20, role: generator, tokens_per_second: 9000}"
    model = make_model(problem("tiny_02", f"measured_rates=[{trainer}, {generator}]"), CALIBRATED)

    assert model.gpu_training_rate["h800"] == pytest.approx(100 / model.demand.trained_tokens)
    state = model.replica(model.nodes["h20-0"], 1)
    assert state is not None
    assert state.samples_per_second == pytest.approx(9000 / model.demand.completion_tokens)


def test_it_says_its_name_and_promises_less_than_rm1():
    given = problem("tiny_02")
    reference, model = CostModel(given), make_model(given, CALIBRATED)

    assert (reference.name, model.name) == ("rm1", "calibrated")
    assert 0 < model.score(SPLIT).samples_per_second < reference.score(SPLIT).samples_per_second
