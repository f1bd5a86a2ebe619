"""Follows a run's policy version: WatchPolicy that survives a lost stream."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.clients.streams import BackgroundStream
from penstock.errors import DeadlineError, PenstockError
from penstock.network.connection import Connection
from penstock.process.tasks import set_within
from penstock.v1 import broker_pb2, broker_pb2_grpc


class PolicyWatch(BackgroundStream):
    """Follows one run; an async context manager.

    Args:
        broker: Connection to it.
        run_id: Which run.
    """

    def __init__(self, broker: Connection, *, run_id: str) -> None:
        super().__init__(broker, run_id=run_id)
        self._stub = broker_pb2_grpc.BrokerServiceStub(broker.channel)
        self._changed = asyncio.Event()
        self._version: int | None = None

    async def at_least(self, version: int, *, timeout_s: float) -> int:
        """Wait until the run's version is at least `version`; returns it.

        Raises:
            DeadlineError: It was not reached within `timeout_s` seconds of the last change; time in which the broker
                was away does not count.
            RunClosedError: The run was closed first.
            PenstockError: The broker refused for good.
        """
        while self._version is None or self._version < version:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            if not await set_within(self._changed, timeout_s) and self._stream.outage.since_s is None:
                raise DeadlineError(
                    f"{self._peer}: run {self._run_id!r} stays at version {self._version} for {timeout_s:g} s; is a "
                    "trainer attached?"
                )
        return self._version

    async def _follow(self) -> None:
        # The broker sends only when the version changes; a dead one is found by the channel's keepalive.
        call: Any = self._stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id=self._run_id))
        await self._stream.listen(call, self._take)

    def _take(self, response: broker_pb2.WatchPolicyResponse) -> None:
        self._version = response.policy_version
        self._changed.set()

    def _fail(self, error: PenstockError) -> None:
        super()._fail(error)
        self._changed.set()
