"""What receivers cannot fetch from is told for a while after they said so last, and is bounded."""

from __future__ import annotations

from penstock.clock import ManualClock
from services.trainer.publishing.source_failures import FORGET_S, MAX_FAILURES, SourceFailures


def test_a_failure_is_reported_until_it_has_not_been_repeated_for_a_while() -> None:
    clock = ManualClock()
    failures = SourceFailures(clock)
    failures.note("gen-1", "https://a:1/weights/r/x", "why")
    assert failures.lines() == ["weights of gen-1: why"]
    clock.advance(FORGET_S - 1)
    failures.note("gen-1", "https://a:1/weights/r/another", "why still")
    clock.advance(FORGET_S - 1)
    assert failures.lines() == ["weights of gen-1: why still"]
    clock.advance(2)
    assert failures.lines() == []


def test_the_oldest_make_room_and_no_name_adds_lines() -> None:
    failures = SourceFailures(ManualClock())
    for number in range(3 * MAX_FAILURES):
        failures.note(f"gen-{number}\nforged", "https://a", "why")
    lines = failures.lines()
    assert len(lines) == MAX_FAILURES
    assert lines[-1] == f"weights of gen-{3 * MAX_FAILURES - 1}?forged: why"
