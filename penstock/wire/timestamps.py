"""Seconds to and from protobuf's Timestamp (since the Unix epoch) and Duration, to the microsecond."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def timestamp(unix_s: float) -> Timestamp:
    """Seconds since the Unix epoch as a message."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(unix_s * 1e6))
    return stamp


def unix_s(stamp: Timestamp) -> float:
    """A message as seconds since the Unix epoch."""
    return stamp.ToMicroseconds() / 1e6


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message
