"""Tells a generator's lease stream where the run's core is written, so that one broker has all of a run's leases."""

from __future__ import annotations

from penstock.v1 import broker_pb2
from services.broker.brokers.membership import Membership
from services.broker.runtime.run_replica import RunReplica

MOVE_S = 8.0
"""How long a stream that was asked to move gets no leases: longer than a generator tries to connect."""


class CoreHints:
    """What one stream was shown.

    Args:
        membership: Who owns what; None if this broker is alone.
        replica: The run's.
        may_move: Whether the generator follows.
    """

    def __init__(self, membership: Membership | None, replica: RunReplica, *, may_move: bool) -> None:
        self._membership = membership if may_move else None
        self._replica = replica
        self._sent_address = ""
        self._sent_s = 0.0

    def news(self) -> broker_pb2.CoreOwner | None:
        """The owner, if it is another broker than this one, and than the one shown before."""
        if self._membership is None or not self._replica.has_shards:
            return None
        roll = self._membership.roll
        owner = self._membership.core_owner(self._replica.run_id, leases_here=True)
        if roll is None or owner is None or owner.address == self._sent_address:
            return None
        self._sent_address = owner.address
        if owner.name == self._membership.name:
            self._sent_s = 0.0
            return None
        self._sent_s = self._replica.clock.monotonic_s()
        return broker_pb2.CoreOwner(address=owner.address, epoch=roll.epoch)

    @property
    def is_moving(self) -> bool:
        """Whether the stream is about to be opened elsewhere: what is sent now may be lost."""
        return self._sent_s > 0 and self._replica.clock.monotonic_s() - self._sent_s < MOVE_S
