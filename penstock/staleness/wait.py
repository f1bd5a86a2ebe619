"""WAIT: nothing becomes too old, because generators begin only what will be in time and the trainer waits for it."""

from __future__ import annotations

from penstock.staleness.policy import StalenessPolicy
from penstock.v1 import broker_pb2


class Wait(StalenessPolicy):
    """Differs from AReaL: counts by the generator's version, which may lag the trainer's."""

    name = "wait"
    number = broker_pb2.STALE_POLICY_WAIT
    keeps_places = True
    accepts_late_puts = False

    def start_version(self, *, trainer: int, generator: int, can_restart: bool = True) -> int:
        """See `StalenessPolicy.start_version`."""
        return generator

    def may_join(self, *, group: int, generator: int) -> bool:
        """Only if its tokens do not make the group older."""
        return generator >= group
