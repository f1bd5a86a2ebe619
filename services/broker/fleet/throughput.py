"""Measures generators' speed relative to their profiles. Pure."""

from __future__ import annotations

from typing import NamedTuple

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel

WEIGHT = 0.2
"""Weight of the newest heartbeat in the moving average: it follows a change of speed in about five, ten seconds."""
MAX_FACTOR = 1000.0
"""What a heartbeat says is bounded here, not refused: a refusal would end the stream of a generator that works."""
MIN_TOKENS_PER_SECOND, MAX_TOKENS_PER_SECOND = 1e-6, 1e12


class Speed(NamedTuple):
    """Moving averages over a generator's heartbeats."""

    step_factor: float
    """Ratio of its decode steps' time to its profile's."""
    tokens_per_second: float


def measured(before: Speed | None, hello: broker_pb2.GeneratorHello, beat: broker_pb2.GeneratorBeat) -> Speed | None:
    """The speed after a heartbeat, from that before it; None before it decoded anything. An idle one's is kept."""
    if not (beat.num_running and beat.tokens_per_second > 0):
        return before
    model = LatencyModel.from_profile(hello.profile)
    kv_tokens = min(1.0, beat.kv_cache_usage) * (model.kv_capacity_tokens or 0)
    stated_s = model.step_s(beat.num_running, kv_tokens)
    rate = min(MAX_TOKENS_PER_SECOND, max(MIN_TOKENS_PER_SECOND, beat.tokens_per_second))
    factor = min(MAX_FACTOR, max(1 / MAX_FACTOR, beat.num_running / rate / stated_s))
    if before is None:
        return Speed(factor, rate)
    return Speed(
        before.step_factor * (factor / before.step_factor) ** WEIGHT,
        before.tokens_per_second + WEIGHT * (rate - before.tokens_per_second),
    )
