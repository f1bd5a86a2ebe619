"""Bounds the flush interval that a broker asks of generators: how long they gather tokens before they send them."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

LONGEST_ASKED_S = 5.0
"""A broker asks for no more, and a generator heeds no more."""


def asked_s(interval: Duration) -> float:
    """Seconds that a broker asks for, within the bounds whatever it sent; 0 if it asks for nothing."""
    return min(max(0.0, interval.seconds + interval.nanos / 1e9), LONGEST_ASKED_S)
