"""The heartbeat interval that a busy broker asks of generators."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from penstock.heartbeat_interval import BEAT_INTERVAL_S, LONGEST_ASKED_S, MIN_BEAT_GAP_S, least_gap_s
from services.broker.rules.flush_pacing import BUSY, CALM, UPDATE_EVERY_S, FlushInterval
from services.broker.rules.heartbeat_pacing import FEW_PER_S, HeartbeatInterval


def _update(interval: HeartbeatInterval, load: float, *, per_second: float = 2 * FEW_PER_S) -> None:
    for _ in range(round(per_second * UPDATE_EVERY_S)):
        interval.note_beat()
    interval.update(load, UPDATE_EVERY_S)


def test_it_rises_while_the_load_is_high_and_returns_slowly_once_it_is_not() -> None:
    interval = HeartbeatInterval()
    asked: list[float] = []
    for load in [BUSY + 0.01] * 3 + [CALM - 0.01] * 40:
        _update(interval, load)
        asked.append(interval.asked_s(math.inf))
    assert asked[:3] == [3.0, LONGEST_ASKED_S, LONGEST_ASKED_S]
    assert all(later == 0.0 or 0.94 * earlier < later < earlier for earlier, later in pairwise(asked[2:-20]))
    assert asked[-1] == 0.0


def test_signs_of_life_follow_it() -> None:
    interval = HeartbeatInterval()
    assert interval.stretch == 1.0
    _update(interval, 1.0)
    assert interval.stretch == 1.5
    _update(interval, 1.0)
    assert interval.stretch == LONGEST_ASKED_S / BEAT_INTERVAL_S


def test_a_load_between_busy_and_calm_changes_nothing() -> None:
    interval = HeartbeatInterval()
    _update(interval, BUSY)
    assert interval.asked_s(math.inf) == 0.0
    _update(interval, 1.0)
    _update(interval, CALM)
    assert interval.asked_s(math.inf) == 3.0


def test_twice_the_heartbeats_that_a_core_can_take_settle_at_what_it_can() -> None:
    flush, interval = FlushInterval(), HeartbeatInterval()
    loads: list[float] = []
    for _ in range(120):
        asked_s = interval.asked_s(60.0) or BEAT_INTERVAL_S
        flush.update(min(1.0, 0.05 + 1.5 * BEAT_INTERVAL_S / asked_s))
        _update(interval, flush.load)
        loads.append(flush.load)
    assert all(CALM <= load <= BUSY for load in loads[-60:])


@pytest.mark.parametrize(("lease_s", "asked_s"), [(3600.0, 4.5), (15.0, 3.75), (12.0, 3.0), (8.0, 0.0), (0.1, 0.0)])
def test_a_lease_outlives_four_heartbeats(lease_s: float, asked_s: float) -> None:
    interval = HeartbeatInterval()
    for _ in range(3):
        _update(interval, 1.0)
    assert interval.asked_s(lease_s) == pytest.approx(asked_s)


def test_few_heartbeats_are_no_reason_to_ask_for_fewer() -> None:
    interval = HeartbeatInterval()
    _update(interval, 1.0, per_second=FEW_PER_S)
    assert interval.asked_s(math.inf) == 0.0
    _update(interval, 1.0)
    # As they are asked for fewer, fewer come: that is no reason to ask for more.
    _update(interval, 1.0, per_second=FEW_PER_S)
    assert interval.asked_s(math.inf) == 3.0
    _update(interval, 0.0, per_second=0.0)
    assert interval.asked_s(math.inf) < 3.0


def test_free_slots_are_reported_half_a_second_later_at_most() -> None:
    assert least_gap_s(BEAT_INTERVAL_S) == MIN_BEAT_GAP_S
    assert least_gap_s(LONGEST_ASKED_S) == pytest.approx(MIN_BEAT_GAP_S + 0.5)
