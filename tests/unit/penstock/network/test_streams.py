import asyncio

import grpc
import pytest

from penstock.clients import streams
from penstock.clients.streams import Reconnecting
from penstock.errors import ServiceUnavailableError


class BrokenCall:
    """A call whose first write finds that it has ended, and whose status comes a little later."""

    def __init__(self):
        self._is_over = asyncio.Event()

    async def write(self, _request):
        self._is_over.set()
        raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self):
        await self._is_over.wait()
        return grpc.aio.EOF

    def cancel(self):
        return True


@pytest.mark.parametrize("_round", range(3))
async def test_the_requests_of_a_broken_stream_are_closed_when_it_ends(_round):
    is_closed = []

    async def requests():
        try:
            while True:
                yield 1
        finally:
            is_closed.append(True)

    # Held here, so that no garbage collector closes them.
    held = requests()
    await Reconnecting("p").converse(BrokenCall(), held, lambda _: None, max_silence_s=5)
    assert is_closed == [True]


async def test_a_stream_whose_first_response_is_late_is_given_longer_at_each_try_until_one_is_heard(monkeypatch):
    waits, answers = [], iter([None, None, None, None, "first", "second", None, None, "over"])

    async def read(_call, *, peer, max_silence_s):
        waits.append(max_silence_s)
        if (answer := next(answers)) is None:
            raise ServiceUnavailableError(f"{peer}: silent")
        if answer == "over":
            raise asyncio.CancelledError
        return answer

    monkeypatch.setattr(streams, "read", read)
    stream = Reconnecting("p", most_s=0.0)

    async def follow():
        await stream.listen(BrokenCall(), lambda _: None, max_silence_s=15.0)

    with pytest.raises(asyncio.CancelledError):
        await stream.run(follow, lambda _: None)
    assert waits == [15.0, 30.0, 60.0, 60.0, 60.0, 15.0, 15.0, 15.0, 30.0]
