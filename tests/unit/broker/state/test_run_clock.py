"""The clock of a run: never goes back, counts no gap, and does not depend on any machine's wall clock."""

from __future__ import annotations

import pytest

from penstock.clock import ManualClock
from services.broker.records.run_clock import MAX_GAP_S, Reading, RunClock, StoredClock, max_gap_s
from services.broker.rules.limits import Limits
from tests.helpers.brokers.broker import duration, limits

START_S = 1_000.0


def advanced(*steps: float) -> list[Reading]:
    """Readings of a clock that is advanced after each of these steps of its machine's clock."""
    clock, machine_s = StoredClock(), START_S
    readings = [clock.advance(machine_s, MAX_GAP_S)]
    for step in steps:
        machine_s += step
        assert clock.read(machine_s, MAX_GAP_S) == clock.advance(machine_s, MAX_GAP_S)
        readings.append(clock.read(machine_s, MAX_GAP_S))
    return readings


def test_it_goes_on_with_the_machines_clock() -> None:
    assert advanced(0.25, 0.25, 2.0)[-1] == Reading(now_s=START_S + 2.5, unbroken_since_s=START_S)


def test_a_machine_that_is_set_back_or_replaced_by_one_that_is_behind_does_not_take_it_back() -> None:
    assert [reading.now_s for reading in advanced(1.0, -3600.0, 1.0)] == [
        START_S,
        START_S + 1,
        START_S + 1,
        START_S + 2,
    ]


@pytest.mark.parametrize("jump_s", [60.0, 3600.0])
def test_a_jump_ahead_is_a_gap_and_coming_back_from_it_is_none(jump_s: float) -> None:
    readings = advanced(1.0, jump_s, 1.0, -jump_s, 1.0)
    assert readings[-1] == Reading(now_s=START_S + jump_s + 3, unbroken_since_s=START_S + jump_s + 1)


def test_after_a_step_back_the_step_to_where_it_was_makes_up_for_it() -> None:
    [*_, last] = advanced(1.0, -60.0, 60.0, 1.0)
    assert last.now_s == START_S + 2


def test_between_readings_a_broker_goes_on_by_its_monotonic_clock_and_not_for_long() -> None:
    local = ManualClock()
    clock = RunClock(local)
    assert (clock.now_s(), clock.unbroken_since_s) == (local.now_s(), 0.0)
    clock.take(Reading(now_s=START_S, unbroken_since_s=START_S - 10))
    local.advance(0.5)
    local.set_wall(-3600.0)
    assert clock.now_s() == START_S + 0.5
    local.advance(1000.0)
    assert clock.now_s() == START_S + MAX_GAP_S
    clock.take(Reading(now_s=START_S + 1, unbroken_since_s=START_S - 10))
    assert clock.now_s() == START_S + MAX_GAP_S, "it went back"
    assert clock.age_s(0.0) == MAX_GAP_S + 10


def test_a_store_that_lost_its_clock_is_followed() -> None:
    clock = RunClock(ManualClock())
    clock.take(Reading(now_s=START_S, unbroken_since_s=START_S))
    clock.take(Reading(now_s=START_S - 3600, unbroken_since_s=START_S - 3600))
    assert clock.now_s() == START_S - 3600


def test_a_gap_is_a_third_of_the_shortest_lease_but_neither_tiny_nor_long() -> None:
    def gap_s(generation_s: float, scoring_s: float) -> float:
        leases = {"generation_lease": duration(generation_s), "scoring_lease": duration(scoring_s)}
        return max_gap_s(Limits.from_proto(limits(**leases)))

    assert (gap_s(15, 15), gap_s(9, 600), gap_s(600, 9), gap_s(0.5, 9)) == (5, 3, 3, 1)
