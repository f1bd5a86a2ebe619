from __future__ import annotations

import pytest

from penstock.clock import ManualClock
from penstock.process.busy_time import MAX_SPANS, BusyTracker


def test_overlapping_samples_make_one_span():
    clock = ManualClock(100.0)
    busy = BusyTracker(clock)
    busy.begin()
    clock.advance(1)
    busy.begin()
    clock.advance(1)
    busy.end()
    clock.advance(1)
    busy.end()
    clock.advance(5)
    assert busy.take_spans() == [(100.0, 103.0)]
    assert busy.busy_s == 3.0


def test_a_clock_that_is_set_while_samples_decode_makes_no_span_longer_or_shorter():
    clock = ManualClock(100.0)
    busy = BusyTracker(clock)
    busy.begin()
    for step_s in (3600.0, -60.0, -3600.0):
        clock.set_wall(step_s)
        clock.advance(1)
    busy.end()
    assert busy.take_spans() == [(100.0, 103.0)]
    assert busy.busy_s == 3.0


def test_a_span_still_going_on_is_cut_and_continued_without_overlap():
    clock = ManualClock(100.0)
    busy = BusyTracker(clock)
    busy.begin()
    clock.advance(2)
    assert busy.take_spans() == [(100.0, 102.0)]
    clock.advance(3)
    busy.end()
    assert busy.take_spans() == [(102.0, 105.0)]
    assert busy.take_spans() == []
    assert busy.busy_s == 5.0


def test_too_many_spans_are_joined_where_the_gap_is_smallest():
    clock = ManualClock(0.0)
    busy = BusyTracker(clock)
    for index in range(MAX_SPANS + 1):
        busy.begin()
        clock.advance(1)
        busy.end()
        clock.advance(0.25 if index == 10 else 4)
    spans = busy.take_spans()
    assert len(spans) == MAX_SPANS
    assert spans[10][1] - spans[10][0] == 2.25
    assert sum(end_s - start_s for start_s, end_s in spans) == MAX_SPANS + 1 + 0.25


def test_ending_more_samples_than_began_is_refused():
    busy = BusyTracker(ManualClock())
    with pytest.raises(ValueError, match="no sample"):
        busy.end()
