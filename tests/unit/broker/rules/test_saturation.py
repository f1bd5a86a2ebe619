"""When a broker is so short of a core that it cannot know what waits for it."""

from __future__ import annotations

from services.broker.rules.flush_pacing import UPDATE_EVERY_S
from services.broker.rules.saturation import AFTER_S, FULL, RECOVERY_S, Saturation


def pass_time(saturation: Saturation, seconds: float, busy: float) -> None:
    """Updates as they are due."""
    for _ in range(round(seconds / UPDATE_EVERY_S)):
        saturation.update(busy, UPDATE_EVERY_S)


def test_a_broker_with_no_time_to_spare_is_behind_until_it_had_some_for_a_while() -> None:
    saturation = Saturation()
    pass_time(saturation, AFTER_S - UPDATE_EVERY_S, 1.0)
    assert not saturation.is_behind
    pass_time(saturation, UPDATE_EVERY_S, FULL)
    assert saturation.is_behind
    pass_time(saturation, 3600.0, 1.0)
    pass_time(saturation, RECOVERY_S - UPDATE_EVERY_S, 0.0)
    assert saturation.is_behind
    pass_time(saturation, UPDATE_EVERY_S, 0.0)
    assert not saturation.is_behind


def test_bursts_and_a_high_load_are_not_enough() -> None:
    saturation = Saturation()
    for _ in range(100):
        pass_time(saturation, AFTER_S - UPDATE_EVERY_S, 1.0)
        pass_time(saturation, UPDATE_EVERY_S, FULL - 0.01)
        assert not saturation.is_behind


def test_a_loop_that_was_held_is_behind_at_once() -> None:
    """It could not measure meanwhile."""
    saturation = Saturation()
    saturation.update(1.0, 30.0)
    assert saturation.is_behind
