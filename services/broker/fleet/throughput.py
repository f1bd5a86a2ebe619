"""Measures generators' speed relative to their profiles. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel

WEIGHT = 0.2
"""Weight of the newest heartbeat in the moving average: it follows a change of speed in about five, ten seconds."""
MAX_FACTOR = 1000.0


@dataclass(slots=True)
class Speed:
    """Moving averages over a generator's heartbeats."""

    step_factor: float
    """Ratio of its decode steps' time to its profile's."""
    tokens_per_second: float


class Speeds:
    """The measured speed of each generator."""

    def __init__(self) -> None:
        self._speeds: dict[str, Speed] = {}

    def get(self, generator_id: str) -> Speed | None:
        """The measurements; None before it decoded anything."""
        return self._speeds.get(generator_id)

    def observe(self, hello: broker_pb2.GeneratorHello, beat: broker_pb2.GeneratorBeat) -> Speed | None:
        """Learn from a heartbeat; that of an idle generator is ignored."""
        speed = self._speeds.get(hello.generator_id)
        if not (beat.num_running and beat.tokens_per_second > 0):
            return speed
        model = LatencyModel.from_profile(hello.profile)
        kv_tokens = beat.kv_cache_usage * (model.kv_capacity_tokens or 0)
        stated_s = model.step_s(beat.num_running, kv_tokens)
        seen = math.log(beat.num_running / beat.tokens_per_second / stated_s)
        seen = max(-math.log(MAX_FACTOR), min(math.log(MAX_FACTOR), seen))
        if speed is None:
            speed = self._speeds[hello.generator_id] = Speed(math.exp(seen), beat.tokens_per_second)
        else:
            speed.step_factor *= math.exp(WEIGHT * (seen - math.log(speed.step_factor)))
            speed.tokens_per_second += WEIGHT * (beat.tokens_per_second - speed.tokens_per_second)
        return speed

    def forget(self, generator_id: str) -> None:
        """Forget a generator that is gone."""
        self._speeds.pop(generator_id, None)
