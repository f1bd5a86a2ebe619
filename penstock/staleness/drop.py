"""DROP: nothing waits; what falls behind is dropped and its prompt queued again."""

from __future__ import annotations

from penstock.staleness.continue_ import Continue
from penstock.v1 import broker_pb2


class Drop(Continue):
    """Starts as much as `Continue`, but a step keeps no places for what is due."""

    name = "drop"
    number = broker_pb2.STALE_POLICY_DROP
    keeps_places = False
