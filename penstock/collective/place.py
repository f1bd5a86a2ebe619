"""A process's place in a broadcast group, and the error that ends one."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.collective.broadcast_backend import Transport
from penstock.errors import ServiceUnavailableError


class BroadcastError(ServiceUnavailableError):
    """The broadcast did not start or was interrupted; fetch the content instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A process's place in a group."""

    group_id: str
    """Names the group in the store."""
    rank: int
    """0 sends."""
    num_ranks: int
    """Members, the sender included."""
    backend: Transport
    """The library, GLOO or NCCL; the same for all members."""
    stall_s: float
    """Longest time that forming the group, or one piece, may take."""
    piece_bytes: int
    """Bytes that travel at a time."""
