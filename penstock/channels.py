"""A channel that sends each call over one of several other channels."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial, partialmethod
from typing import Any, Self

import grpc

_ON_SILENCE = "penstock_on_silence"
"""Attribute of a call: what `note_silence` calls. That a call was cancelled does not say why."""


def note_silence(call: Any) -> None:
    """Report that the server says nothing on a stream, which the caller gives up."""
    getattr(call, _ON_SILENCE, _ignore)()


def _ignore() -> None:
    """The call is not over one of several channels."""


class SwitchingChannel(grpc.aio.Channel):
    """A channel like any other to stubs; closing it closes the channels below it."""

    @abstractmethod
    def _current(self) -> grpc.aio.Channel:
        """The channel that the next call uses."""

    @abstractmethod
    def _all(self) -> Iterable[grpc.aio.Channel]:
        """All open channels."""

    def _begun(self, channel: grpc.aio.Channel) -> None:
        """A call over that channel begins; `_ended` hears of its end."""

    @abstractmethod
    def _ended(self, channel: grpc.aio.Channel, call: Any) -> None:
        """A call over that channel has ended."""

    def _silent(self, channel: grpc.aio.Channel) -> None:
        """A call over that channel is given up, as its server says nothing: `note_silence`."""

    async def __aenter__(self) -> Self:
        """Return the channel itself."""
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the channels."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the channels; calls under way get `grace` seconds to end."""
        await asyncio.gather(*(channel.close(grace) for channel in self._all()))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the current channel."""
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """The state of the current channel."""
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the current channel is ready."""
        await self._current().channel_ready()

    def _callable(self, kind: str, *method: Any, **options: Any) -> Callable[..., Any]:
        """A callable of the method, as stubs ask for; see `grpc.aio.Channel`."""
        made_of: grpc.aio.Channel | None = None
        made: Callable[..., Any] | None = None

        def start(*arguments: Any, **call_options: Any) -> Any:
            nonlocal made_of, made
            channel = self._current()
            if made is None or channel is not made_of:
                made_of, made = channel, getattr(channel, kind)(*method, **options)
            call = made(*arguments, **call_options)
            setattr(call, _ON_SILENCE, partial(self._silent, channel))
            self._begun(channel)
            call.add_done_callback(partial(self._ended, channel))
            return call

        return start

    unary_unary: Any = partialmethod(_callable, "unary_unary")
    unary_stream: Any = partialmethod(_callable, "unary_stream")
    stream_unary: Any = partialmethod(_callable, "stream_unary")
    stream_stream: Any = partialmethod(_callable, "stream_stream")
