from random import Random

import pytest

from benchmarks.scheduler.robustness import losses, misjudged
from tests.helpers.plans.problems import problem


def test_every_profiled_number_is_off_by_no_more_than_the_error_and_memory_by_nothing():
    true = problem("tiny_04")
    wrong = misjudged(true, Random(1), 0.2)

    for name, gpu in true.gpu_types.items():
        assert wrong.gpu_types[name].hbm_GB == gpu.hbm_GB
        ratio = wrong.gpu_types[name].tflops_bf16 / gpu.tflops_bf16
        assert 0.8 <= ratio <= 1.2
        assert ratio != 1
    assert wrong.links[0].bw_Gbps != true.links[0].bw_Gbps
    assert wrong.model == true.model


def test_true_numbers_lose_nothing_and_wrong_ones_never_gain():
    stated = problem("tiny_02")
    budget = {"draws": 3, "solver": "exhaustive", "budget_s": 1000.0}

    assert losses(stated, error=0.0, **budget) == [pytest.approx(0.0, abs=1e-12)] * 3
    assert all(loss >= -1e-12 for loss in losses(stated, error=0.2, **budget))
