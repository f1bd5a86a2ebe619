"""What the concurrency tables of `penstock bench generator` say of a rule."""

from __future__ import annotations

import pytest

from benchmarks.generator.compared import compared


def outcome(rate: float, preempted: float) -> dict[str, float]:
    return {"rate": rate, "preempted_share": preempted, "mean_samples": 30.0}


def test_the_best_setting_and_the_best_one_that_preempts_little_are_distinguished():
    swept = {16: outcome(80.0, 0.0), 32: outcome(100.0, 0.02), 64: outcome(125.0, 0.5)}
    found = compared(outcome(110.0, 0.01), swept, rate="rate")
    assert found["best_fixed"] == 64
    assert found["best_fixed_preempted_share"] == 0.5
    assert found["ratio_to_best_fixed"] == pytest.approx(110 / 125)
    assert found["best_calm_fixed"] == 32
    assert found["ratio_to_best_calm_fixed"] == pytest.approx(1.1)


def test_where_every_setting_preempts_there_is_no_calm_one():
    found = compared(outcome(1.0, 0.0), {8: outcome(2.0, 0.3)}, rate="rate")
    assert found["ratio_to_best_fixed"] == 0.5
    assert "ratio_to_best_calm_fixed" not in found
