"""How often generators send heartbeats, and the bounds of what a broker may ask of them instead."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

BEAT_INTERVAL_S = 2.0
"""Of generators that are asked for nothing; a broker asks for no more frequent ones."""
LONGEST_ASKED_S = 4.5
"""A broker asks for no more, and a generator heeds no more: the contract promises one at least every 5 s."""
MIN_BEAT_GAP_S = 0.05
"""Free slots are reported in batches: a heartbeat per finished sample would cost the broker more than the sample."""
GAP_SHARE = 0.2
"""Of what is asked beyond BEAT_INTERVAL_S: by so much longer, half a second at most, a free slot may wait."""


def asked_s(interval: Duration) -> float:
    """Seconds that a broker asks for, within the bounds whatever it sent; 0 if it asks for nothing."""
    seconds = min(interval.seconds + interval.nanos / 1e9, LONGEST_ASKED_S)
    return seconds if seconds > BEAT_INTERVAL_S else 0.0


def least_gap_s(interval_s: float) -> float:
    """Least time between two heartbeats, the second of which reports a change, at this interval."""
    return MIN_BEAT_GAP_S + GAP_SHARE * max(0.0, interval_s - BEAT_INTERVAL_S)
