"""The clock of a run: never goes back, counts no gap, and does not depend on any machine's wall clock."""

from __future__ import annotations

import pytest

from penstock.clock import ManualClock
from services.broker.records.run_clock import (
    BROKER_LIFE_S,
    MAX_GAP_S,
    MOST_BEHIND_S,
    Reading,
    RunClock,
    StoredClock,
    max_gap_s,
)
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
    assert advanced(0.25, 0.25, 2.0)[-1] == Reading(
        now_s=START_S + 2.5, unbroken_since_s=START_S, heard_s=START_S + 2.5
    )


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
    now_s = START_S + jump_s + 3
    assert readings[-1] == Reading(now_s=now_s, unbroken_since_s=START_S + jump_s + 1, heard_s=now_s)


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


class Run:
    """A run's clock and the brokers that advance it; time passes only by `pass_time`."""

    def __init__(self) -> None:
        self.clock = StoredClock()
        self.machine_s = START_S

        self.behind: set[str] = set()
        """Brokers that are."""

    def advance(self, broker: str = "", *, is_leaving: bool = False) -> Reading:
        return self.clock.advance(
            self.machine_s, MAX_GAP_S, broker=broker, is_leaving=is_leaving, is_behind=broker in self.behind
        )

    def pass_time(self, seconds: float, *brokers: str) -> Reading:
        """These brokers advance the clock, once a second."""
        for _ in range(round(seconds)):
            self.machine_s += 1.0
            for broker in brokers:
                self.advance(broker)
        return self.clock.read(self.machine_s, MAX_GAP_S)


def test_what_came_before_a_brokers_last_advance_but_one_was_heard() -> None:
    run = Run()
    assert run.advance("a").heard_s == START_S
    assert run.pass_time(1, "a").heard_s == START_S
    assert run.pass_time(1, "a").heard_s == START_S + 1
    # A broker without streams has nobody to hear, and goes by those that have.
    assert run.pass_time(3, "a", "").heard_s == START_S + 4


def test_a_held_broker_delays_what_others_end_until_it_has_read_and_restarts_all() -> None:
    run = Run()
    run.pass_time(2, "a", "b")
    held_s = run.machine_s
    while run.machine_s < held_s + 30:
        reading = run.pass_time(1, "b")
        assert reading.heard_s == held_s - 1
    assert reading.unbroken_since_s == reading.now_s
    back_s = run.machine_s
    # The first advance after the hold says nothing of what came during it.
    assert run.advance("a") == Reading(now_s=back_s, unbroken_since_s=back_s, heard_s=held_s)
    assert run.pass_time(2, "a", "b") == Reading(now_s=back_s + 2, unbroken_since_s=back_s, heard_s=back_s + 1)


def test_a_stall_too_short_for_a_gap_holds_back_too() -> None:
    run = Run()
    run.pass_time(2, "a", "b")
    held_s = run.machine_s
    assert run.pass_time(MAX_GAP_S - 1, "b") == Reading(
        now_s=held_s + MAX_GAP_S - 1, unbroken_since_s=START_S + 1, heard_s=held_s - 1
    )


def test_a_dead_broker_is_waited_for_as_long_as_its_clients_need_to_be_heard_by_another() -> None:
    run = Run()
    run.pass_time(2, "a", "b")
    dead_s = run.machine_s
    assert run.pass_time(BROKER_LIFE_S, "b").heard_s == dead_s - 1
    reading = run.pass_time(1, "b")
    assert reading.unbroken_since_s == reading.now_s == reading.heard_s + 1
    assert run.pass_time(3, "b").unbroken_since_s == reading.now_s


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_a_broker_that_left_is_not_waited_for(seconds: float) -> None:
    run = Run()
    run.pass_time(2, "a", "b")
    run.advance("a", is_leaving=True)
    assert run.pass_time(seconds, "b").heard_s == run.machine_s - 1


def test_a_broker_that_cannot_store_what_it_read_counts_as_held() -> None:
    run = Run()
    run.pass_time(2, "a")
    held_s = run.machine_s
    for _ in range(10):
        reading = run.pass_time(1, "")
    assert (reading.heard_s, reading.unbroken_since_s) == (held_s - 1, reading.now_s)


def test_a_broker_that_is_behind_lives_and_is_waited_for() -> None:
    run = Run()
    run.pass_time(2, "a", "b")
    heard_s = run.machine_s - 1
    run.behind.add("a")
    held = run.pass_time(MOST_BEHIND_S - 1, "a", "b")
    assert held == Reading(now_s=run.machine_s, unbroken_since_s=START_S + 1, heard_s=heard_s)
    # It keeps up again: what arrived by its advance before this one was read.
    run.behind.clear()
    assert run.pass_time(1, "a", "b").heard_s == run.machine_s - 1


def test_a_broker_that_is_behind_is_not_waited_for_without_end() -> None:
    run = Run()
    run.behind.add("a")
    run.pass_time(10 * MOST_BEHIND_S, "a", "b")
    assert run.clock.read(run.machine_s, MAX_GAP_S).heard_s == run.machine_s - MOST_BEHIND_S
    # Nor one that died of it, which is as dead as any other.
    run.pass_time(BROKER_LIFE_S, "b")
    assert run.pass_time(1, "b").heard_s == run.machine_s - 1
