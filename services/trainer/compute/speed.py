"""Measures how fast a scorer or critic computes, and tells who plans with it (SpeedService)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.network.rpc import Service, service_of
from penstock.v1 import speed_pb2, speed_pb2_grpc

MIN_BUSY_S = 10.0
"""Least time behind a rate: a pass or two say little."""


class Speed:
    """Tokens per second while a process computes.

    Args:
        monotonic_s: The time.
    """

    def __init__(self, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._busy_s, self._num_tokens = 0.0, 0
        self.tokens_per_second = 0.0
        """By the newest MIN_BUSY_S or more; 0 before that."""

    @contextmanager
    def computing(self, num_tokens: int = 0) -> Iterator[None]:
        """A computation under way, in the only thread that computes; those tokens count if it succeeds."""
        begun_s = self._monotonic_s()
        try:
            yield
            self._num_tokens += num_tokens
        finally:
            self._busy_s += self._monotonic_s() - begun_s

    def settle(self) -> None:
        """Note that everything that belongs to the tokens so far was computed."""
        if self._busy_s >= MIN_BUSY_S and self._num_tokens:
            self.tokens_per_second = self._num_tokens / self._busy_s
            self._busy_s, self._num_tokens = 0.0, 0


class SpeedServicer(speed_pb2_grpc.SpeedServiceServicer):
    """Answers with a process' speed."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed

    async def GetSpeed(self, request: speed_pb2.GetSpeedRequest, context: Any) -> speed_pb2.GetSpeedResponse:
        """The newest measurement."""
        del request, context
        return speed_pb2.GetSpeedResponse(tokens_per_second=self._speed.tokens_per_second)


def speed_service(speed: Speed) -> Service:
    """SpeedService of a process, to be given to its Server."""
    return service_of(SpeedServicer(speed))
