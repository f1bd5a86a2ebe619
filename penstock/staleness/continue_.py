"""CONTINUE: groups go on under newer weights, and the trainer waits for what is due; what is still late starts over."""

from __future__ import annotations

from penstock.staleness.policy import StalenessPolicy
from penstock.v1 import broker_pb2


class Continue(StalenessPolicy):
    """A generator that lags may begin what can come too late, unless the broker could not restart it."""

    name = "continue"
    number = broker_pb2.STALE_POLICY_CONTINUE
    keeps_places = True
    accepts_late_puts = True

    def start_version(self, *, trainer: int, generator: int, can_restart: bool = True) -> int:
        """See `StalenessPolicy.start_version`."""
        return trainer if can_restart else generator

    def may_join(self, *, group: int, generator: int) -> bool:
        """Always: the group's oldest token counts."""
        return True
