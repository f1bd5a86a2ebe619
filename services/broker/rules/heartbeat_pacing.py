"""Decides how often generators send heartbeats, so that a busy broker gets fewer. Pure.

The interval follows the same load as the flush interval, by the same steps (`flush_pacing`), once heartbeats are so
frequent that fewer of them help: a broker may be busy with other things, or wait for a core.
"""

from __future__ import annotations

from penstock.heartbeat_interval import BEAT_INTERVAL_S, LONGEST_ASKED_S
from services.broker.rules.flush_pacing import BUSY, followed

LEASE_SHARE = 1 / 4
"""Part of a lease's duration that the interval never exceeds. A lease is renewed when a quarter of it is over: where a
heartbeat comes just before that, the next one may be late by half of a lease before the lease ends."""
FEW_PER_S = 50.0
"""This rate takes a tenth of a core at most, even if each names 256 leases: up to here nothing is asked for."""


class HeartbeatInterval:
    """The interval that one broker process asks for."""

    def __init__(self) -> None:
        self._interval_s = BEAT_INTERVAL_S
        self._num_read = 0
        """Heartbeats since the last update."""

    def asked_s(self, lease_s: float) -> float:
        """The interval, seconds, for leases of this duration; 0 while generators may use their own."""
        asked_s = min(self._interval_s, LEASE_SHARE * lease_s)
        return asked_s if asked_s > BEAT_INTERVAL_S else 0.0

    @property
    def stretch(self) -> float:
        """Factor by which other signs of life may be delayed, too: 1 to 2.25."""
        return self._interval_s / BEAT_INTERVAL_S

    def note_beat(self) -> None:
        """A heartbeat was read."""
        self._num_read += 1

    def update(self, load: float, since_s: float) -> None:
        """Follow the smoothed load, 0 to 1; due whenever that is updated, `since_s` seconds after the last time."""
        if self._num_read <= FEW_PER_S * since_s:
            load = min(load, BUSY)
        self._num_read = 0
        self._interval_s = followed(self._interval_s, load, shortest_s=BEAT_INTERVAL_S, longest_s=LONGEST_ASKED_S)
