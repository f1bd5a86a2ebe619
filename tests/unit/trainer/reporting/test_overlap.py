"""Overlap and idle time from busy spans."""

import pytest

from services.trainer.reporting.overlap import SETTLE_AFTER_S, OverlapMeter, OverlapTotals


def meter_with(*, phase, trainer=(), generators=()):
    meter = OverlapMeter()
    meter.begin(phase[0])
    for start, end in trainer:
        meter.add_trainer_span(start, end)
    for name, spans in generators:
        meter.add_generator_spans(name, spans)
    meter.end(phase[1])
    return meter


def test_alternating_sides_do_not_overlap():
    meter = meter_with(phase=(10, 20), trainer=[(10, 15)], generators=[("g", [(15, 20)])])
    totals = meter.totals(20)
    assert (totals.overlap_ratio, totals.trainer_idle_ratio, totals.generator_idle_ratio) == (0.0, 0.5, 0.5)


def test_full_overlap_of_the_less_busy_side_is_one():
    meter = meter_with(phase=(0, 10), trainer=[(2, 4), (5, 6)], generators=[("g", [(0, 10)])])
    totals = meter.totals(10)
    assert totals.overlap_ratio == 1.0
    assert totals.trainer_idle_ratio == pytest.approx(0.7)
    assert totals.generator_idle_ratio == 0.0


def test_two_generators_at_once_count_once():
    meter = meter_with(phase=(0, 10), trainer=[(0, 10)], generators=[("a", [(0, 6)]), ("b", [(4, 8)])])
    assert meter.totals(10) == OverlapTotals(phase_s=10, trainer_busy_s=10, generator_busy_s=8, overlap_s=8)


def test_spans_outside_the_training_phase_are_left_out():
    meter = meter_with(phase=(10, 20), trainer=[(5, 12), (19, 30)], generators=[("g", [(0, 11), (19.5, 40)])])
    assert meter.totals(50) == OverlapTotals(phase_s=10, trainer_busy_s=3, generator_busy_s=1.5, overlap_s=1.5)


def test_spans_reported_twice_are_counted_once():
    meter = meter_with(phase=(0, 10), generators=[("g", [(0, 2)]), ("g", [(0, 2), (1, 3)]), ("g", [(2, 3), (5, 6)])])
    assert meter.totals(10).generator_busy_s == 4


def test_settling_changes_no_total_and_forgets_old_spans():
    plain, settled = OverlapMeter(), OverlapMeter()
    for meter in (plain, settled):
        meter.begin(0.0)
    for second in range(0, 1000, 2):
        for meter in (plain, settled):
            meter.add_trainer_span(second, second + 1.5)
            meter.add_generator_spans("g", [(second + 0.5, second + 2.0)])
        settled.settle(second + 2.0)
    for meter in (plain, settled):
        meter.end(1000.0)
    for field in ("phase_s", "trainer_busy_s", "generator_busy_s", "overlap_s"):
        assert getattr(settled.totals(1000.0), field) == pytest.approx(getattr(plain.totals(1000.0), field))
    assert len(settled._trainer) < SETTLE_AFTER_S * 2


def test_a_restored_meter_adds_to_what_was_before():
    meter = OverlapMeter()
    meter.restore(OverlapTotals(phase_s=5, trainer_busy_s=2, generator_busy_s=3, overlap_s=1))
    meter.begin(100)
    meter.add_trainer_span(100, 101)
    meter.end(105)
    assert meter.totals(105) == OverlapTotals(phase_s=10, trainer_busy_s=3, generator_busy_s=3, overlap_s=1)


def test_before_any_training_there_are_no_ratios():
    totals = OverlapMeter().totals(10)
    assert (totals.overlap_ratio, totals.trainer_idle_ratio, totals.generator_idle_ratio) == (None, None, None)
