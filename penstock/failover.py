"""One channel over several servers that stand in for each other, such as the brokers on one Redis.

Promises:
- Calls go to one server, at first the first of the list, for as long as it works: the current one.
- A call that ends with UNAVAILABLE or DEADLINE_EXCEEDED at the current server makes the next of the list the current
  one, whatever the reason: the process is gone, drains, hangs, or has lost what it needs itself.
- Nothing is called again here: callers repeat with back-off and jitter as they do with one server, and every call of
  Penstock may be repeated.

gRPC's own pick_first over an `ipv4:` list was the alternative. It takes no host names, no certificate names, and stays
with a broker that answers every call with UNAVAILABLE because its own way to Redis is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import structlog

QUIET_S = 5.0
_MOVES_ON = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_log = structlog.get_logger()


class FailoverChannel(grpc.aio.Channel):
    """See the module. For stubs it is a channel like any other; closing it closes the channels."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], targets: Sequence[str]) -> None:
        self._channels = channels
        self._targets = targets
        self._current = 0
        self._changed_s = -QUIET_S
        self._judging: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> str:
        """The server that calls go to now."""
        return self._targets[self._current]

    async def __aenter__(self) -> FailoverChannel:
        """The channel itself."""
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the channels."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the channels; calls under way get `grace` seconds to end."""
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))
        for task in self._judging:
            task.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the current server's channel."""
        return self._channels[self._current].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the current server's channel."""
        await self._channels[self._current].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Until the current server's channel is ready."""
        await self._channels[self._current].channel_ready()

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        """A callable of the method, as stubs ask for; see `grpc.aio.Channel`."""
        return self._callable([channel.unary_unary(*method, **options) for channel in self._channels])

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        """A callable of the method, as stubs ask for; see `grpc.aio.Channel`."""
        return self._callable([channel.unary_stream(*method, **options) for channel in self._channels])

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        """A callable of the method, as stubs ask for; see `grpc.aio.Channel`."""
        return self._callable([channel.stream_unary(*method, **options) for channel in self._channels])

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        """A callable of the method, as stubs ask for; see `grpc.aio.Channel`."""
        return self._callable([channel.stream_stream(*method, **options) for channel in self._channels])

    def _callable(self, callables: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        def start(*arguments: Any, **options: Any) -> Any:
            index = self._current
            call = callables[index](*arguments, **options)
            call.add_done_callback(partial(self._ended, index))
            return call

        return start

    def _ended(self, index: int, call: Any) -> None:
        if index == self._current:
            task = asyncio.ensure_future(self._judge(index, call))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)

    async def _judge(self, index: int, call: Any) -> None:
        code = await call.code()
        if code in _MOVES_ON and index == self._current:
            self._current = (index + 1) % len(self._channels)
            now_s = asyncio.get_running_loop().time()
            # Where all are unavailable clients go round: said once in a while only.
            log = _log.info if now_s - self._changed_s > QUIET_S else _log.debug
            log("server changed", lost=self._targets[index], now=self.target, code=code.name)
            self._changed_s = now_s
