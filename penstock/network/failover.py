"""One channel over several interchangeable servers, such as the brokers on one Redis.

Promises:
- Calls go to one server, at first the first of the list, for as long as it works: the current one.
- A call that ends with UNAVAILABLE or DEADLINE_EXCEEDED at the current server makes the next of the list the current
  one, whatever the reason: the process is gone, drains, hangs, or has lost what it needs itself. So does a stream that
  its client gives up as silent, which ends as cancelled.
- Calls are not retried here: callers retry with back-off and jitter as they do with one server, and every call of
  Penstock may be retried.

gRPC's own pick_first over an `ipv4:` list was the alternative. It takes no host names, no certificate names, and stays
with a broker that answers every call with UNAVAILABLE because its own way to Redis is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from penstock.channels import SwitchingChannel
from penstock.process.logger import get_logger

QUIET_S = 5.0
_MOVES_ON = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_log = get_logger()


class FailoverChannel(SwitchingChannel):
    """See the module."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], targets: Sequence[str]) -> None:
        self._channels = channels
        self._targets = targets
        self._index = 0
        self._changed_s = -QUIET_S
        self._judging: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> str:
        """The server that calls go to now."""
        return self._targets[self._index]

    async def close(self, grace: float | None = None) -> None:
        """Close the channels; calls under way get `grace` seconds to end."""
        await super().close(grace)
        for task in self._judging:
            task.cancel()

    def _current(self) -> grpc.aio.Channel:
        return self._channels[self._index]

    def _all(self) -> Iterable[grpc.aio.Channel]:
        return self._channels

    def _ended(self, channel: grpc.aio.Channel, call: Any) -> None:
        if channel is self._channels[self._index]:
            task = asyncio.ensure_future(self._judge(self._index, call))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)

    async def _judge(self, index: int, call: Any) -> None:
        code = await call.code()
        if code in _MOVES_ON:
            self._move_on(index, code.name)

    def _silent(self, channel: grpc.aio.Channel) -> None:
        self._move_on(self._channels.index(channel), "silent")

    def _move_on(self, index: int, why: str) -> None:
        """Leave that server, unless that was done already."""
        if index == self._index:
            self._index = (index + 1) % len(self._channels)
            now_s = asyncio.get_running_loop().time()
            # When all are unavailable, clients go round in circles: log it only now and then.
            log = _log.info if now_s - self._changed_s > QUIET_S else _log.debug
            log("server changed", lost=self._targets[index], now=self.target, why=why)
            self._changed_s = now_s
