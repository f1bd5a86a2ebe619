import asyncio

import grpc
import pytest

from penstock.clients.streams import Reconnecting


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
