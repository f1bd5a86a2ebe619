"""How fast a reward worker is counts while it is as busy as it may be."""

from contextlib import ExitStack

from penstock.clock import ManualClock
from services.reward.full_rate import MIN_FULL_S, FullRate


def test_only_time_in_which_all_calls_are_under_way_counts():
    clock = ManualClock()
    rate = FullRate(num_calls=2, monotonic_s=clock.monotonic_s)
    # One call at a time: the worker waits for samples.
    for _ in range(5):
        with rate.call(100):
            clock.advance(MIN_FULL_S)
    assert rate.samples_per_second == 0
    with rate.call(0):
        for _ in range(10):
            with rate.call(8):
                clock.advance(MIN_FULL_S / 10)
            clock.advance(100)
    assert rate.samples_per_second == 80 / MIN_FULL_S


def test_time_in_which_calls_wait_for_their_grader_does_not_count():
    clock = ManualClock()
    rate = FullRate(num_calls=2, monotonic_s=clock.monotonic_s)
    with ExitStack() as calls:
        calls.enter_context(rate.call(10))
        calls.enter_context(rate.call(30))
        clock.advance(3600)
        rate.skip()
        clock.advance(MIN_FULL_S)
    assert rate.samples_per_second == 30 / MIN_FULL_S
