"""Seconds since the Unix epoch to and from protobuf's Timestamp, to the microsecond."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp


def timestamp(unix_s: float) -> Timestamp:
    """Seconds since the Unix epoch as a message."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(unix_s * 1e6))
    return stamp


def unix_s(stamp: Timestamp) -> float:
    """A message as seconds since the Unix epoch."""
    return stamp.ToMicroseconds() / 1e6
