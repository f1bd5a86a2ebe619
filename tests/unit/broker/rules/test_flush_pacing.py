"""The flush interval that a busy broker asks of generators, on a model of its work in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from google.protobuf.duration_pb2 import Duration
from pydantic import ValidationError

from penstock.clock import ManualClock
from penstock.flush_interval import LONGEST_ASKED_S, asked_s
from services.broker.config import BrokerConfig
from services.broker.rules.flush_pacing import (
    BUSY,
    CALM,
    DEFAULT_LONGEST_S,
    SHORTEST_S,
    UPDATE_EVERY_S,
    FlushInterval,
)


@dataclass
class _Broker:
    """A process whose work for tokens is `share` of its time at the shortest interval, per chunk; `rest` is not."""

    interval: FlushInterval = field(default_factory=FlushInterval)
    rest: float = 0.05

    def run(self, seconds: float, share: float) -> list[float]:
        """The intervals that generators use."""
        used: list[float] = []
        for _ in range(round(seconds / UPDATE_EVERY_S)):
            used.append(self.interval.asked_s or SHORTEST_S)
            self.interval.update(min(1.0, self.rest + share * SHORTEST_S / used[-1]))
        return used


def test_three_times_the_load_it_can_carry_is_carried_within_seconds_and_steadily() -> None:
    broker = _Broker()
    used = broker.run(seconds=60.0, share=3.0)
    assert max(used[: round(5.0 / UPDATE_EVERY_S)]) >= 3 * SHORTEST_S
    steady = used[-60:]
    assert CALM <= broker.interval.load <= BUSY
    assert max(steady) - min(steady) < 0.05 * max(steady)


def test_the_interval_is_bounded_and_returns_slowly_once_the_load_is_gone() -> None:
    broker = _Broker()
    assert max(broker.run(seconds=20.0, share=100.0)) == DEFAULT_LONGEST_S
    used = broker.run(seconds=60.0, share=0.3)
    assert all(later >= 0.94 * earlier for earlier, later in pairwise(used))
    assert used[round(30.0 / UPDATE_EVERY_S)] == SHORTEST_S
    assert broker.interval.asked_s == 0.0


def test_a_load_that_it_can_carry_is_no_reason_to_ask() -> None:
    broker = _Broker()
    assert set(broker.run(seconds=30.0, share=0.75)) == {SHORTEST_S}


def test_a_single_long_operation_is_no_reason_to_ask() -> None:
    broker = _Broker()
    broker.run(seconds=5.0, share=0.3)
    broker.interval.update(1.0)
    assert set(broker.run(seconds=5.0, share=0.3)) == {SHORTEST_S}


def test_answers_that_are_as_late_as_the_next_requests_count_as_load() -> None:
    broker, clock = _Broker(), ManualClock()
    for _ in range(5):
        for wait_s in (0.1, 0.4):
            with broker.interval.answering(clock):
                clock.advance(wait_s)
        broker.interval.update(0.1)
    asked_s = broker.interval.asked_s
    assert asked_s > SHORTEST_S
    with broker.interval.answering(clock):
        # No answer came since, and one is due: what was measured last still holds.
        broker.interval.update(0.1)
        assert broker.interval.asked_s >= asked_s
    broker.interval.update(0.1)
    broker.interval.update(0.1)
    assert broker.interval.load < CALM


def test_a_broker_may_be_configured_to_ask_for_nothing() -> None:
    broker = _Broker(FlushInterval(0.0))
    broker.run(seconds=20.0, share=100.0)
    assert broker.interval.asked_s == 0.0


def test_the_longest_interval_is_checked() -> None:
    assert BrokerConfig(max_flush_interval_s=0.5).max_flush_interval_s == 0.5
    for wrong in (-0.1, LONGEST_ASKED_S + 0.1):
        with pytest.raises(ValidationError, match="max_flush_interval_s"):
            BrokerConfig(max_flush_interval_s=wrong)


@pytest.mark.parametrize(
    ("sent", "heeded"),
    [
        (Duration(), 0.0),
        (Duration(nanos=500_000_000), 0.5),
        (Duration(seconds=-(10**12)), 0.0),
        (Duration(seconds=1, nanos=-(2**31)), 0.0),
        (Duration(seconds=2**62, nanos=2**31 - 1), LONGEST_ASKED_S),
    ],
)
def test_a_generator_heeds_no_wild_interval(sent: Duration, heeded: float) -> None:
    assert asked_s(sent) == heeded
