"""Asks a broker for the state of a run: only while a page shows it, and at most once a second."""

from __future__ import annotations

import asyncio
import time

from console.inspect.find_run import ask
from penstock.errors import PenstockError
from penstock.v1 import broker_pb2

ASK_EVERY_S = 2.0
LOOKED_AT_S = 20.0
"""So long after the last question the broker is still asked."""


class BrokerWatch:
    """One run at one broker.

    Args:
        broker: host:port, several separated by commas.
        run_id: Which run.
    """

    def __init__(self, broker: str, run_id: str) -> None:
        self._broker, self._run_id = broker, run_id
        self._run: broker_pb2.GetRunResponse | None = None
        self._looked_s = time.monotonic()

    def __call__(self) -> broker_pb2.GetRunResponse | None:
        """The state as it was some seconds ago; None if the broker does not answer, or was not asked yet."""
        self._looked_s = time.monotonic()
        return self._run

    async def follow(self) -> None:
        """Keep the state up to date until cancelled."""
        while True:
            if time.monotonic() - self._looked_s < LOOKED_AT_S:
                self._run = await self._get()
            await asyncio.sleep(ASK_EVERY_S)

    async def _get(self) -> broker_pb2.GetRunResponse | None:
        try:
            return await ask(self._broker, lambda client: client.get_run(self._run_id))
        except PenstockError:
            return None
