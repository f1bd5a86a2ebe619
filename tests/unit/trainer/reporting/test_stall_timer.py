"""Waits add up by cause from one step to the next, whatever ended them."""

import pytest

from penstock.clock import ManualClock
from services.trainer.reporting.stall_timer import Cause, StallTimer


def test_waits_of_a_cause_add_up_until_they_are_taken():
    clock = ManualClock()
    meter = StallTimer(clock)
    for seconds in (2.0, 3.0):
        with meter.waiting(Cause.SAMPLES):
            clock.advance(seconds)
            clock.set_wall(-3600.0)
    clock.advance(10.0)
    with meter.waiting(Cause.PUBLISHING):
        clock.advance(0.5)
    meter.add(Cause.CRITIC, 0.25)
    taken = meter.take()
    assert taken == {
        Cause.SAMPLES: 5.0,
        Cause.ACKNOWLEDGING: 0.0,
        Cause.PUBLISHING: 0.5,
        Cause.CHECKPOINTING: 0.0,
        Cause.CRITIC: 0.25,
    }
    assert not any(meter.take().values())


def test_a_wait_that_fails_counts_too():
    clock = ManualClock()
    meter = StallTimer(clock)

    def fail() -> None:
        with meter.waiting(Cause.CHECKPOINTING):
            clock.advance(4.0)
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert meter.take()[Cause.CHECKPOINTING] == 4.0
