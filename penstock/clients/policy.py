"""A run's policy version, followed: WatchPolicy that survives a lost stream."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import grpc
import structlog

from penstock.errors import DeadlineError, PenstockError, RunClosedError
from penstock.outage import Outage
from penstock.rpc import backoff_s, explained
from penstock.v1 import broker_pb2, broker_pb2_grpc

_log = structlog.get_logger()


class PolicyWatch:
    """Follows one run; an async context manager.

    Args:
        channel: To the broker.
        run_id: Which run.
        peer: Names the broker in messages.
    """

    def __init__(self, channel: grpc.aio.Channel, *, run_id: str, peer: str) -> None:
        self._stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self._run_id, self._peer = run_id, peer
        self._changed = asyncio.Event()
        self._version: int | None = None
        self._failure: PenstockError | None = None
        self._task: asyncio.Task[None] | None = None
        self._outage = Outage(peer)

    async def __aenter__(self) -> Self:
        """Start following."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Let go of the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def at_least(self, version: int, *, timeout_s: float) -> int:
        """The run's version as soon as it is `version` or later.

        Raises:
            DeadlineError: It was not, `timeout_s` seconds after it last changed; time in which the broker was away does
                not count.
            RunClosedError: The run was closed before.
            PenstockError: The broker refused for good.
        """
        while self._version is None or self._version < version:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                if self._outage.since_s is not None:
                    continue
                raise DeadlineError(
                    f"{self._peer}: run {self._run_id!r} stays at version {self._version} for {timeout_s:g} s; is a "
                    "trainer attached?"
                ) from None
        return self._version

    async def _run(self) -> None:
        delays = backoff_s()
        while True:
            try:
                await self._follow_one_stream()
                self._fail(RunClosedError(f"{self._peer}: run {self._run_id!r} was closed", run_id=self._run_id))
                return
            except PenstockError as error:
                if not error.is_retryable:
                    self._fail(error)
                    return
                self._outage.failed(error)
            await asyncio.sleep(next(delays))

    async def _follow_one_stream(self) -> None:
        # The broker says something only when the version changes; keep-alive pings of the channel tell a dead one.
        call: Any = self._stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id=self._run_id))
        try:
            async for response in call:
                self._version = response.policy_version
                self._outage.answered()
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            raise await explained(error, peer=self._peer) from error
        finally:
            call.cancel()

    def _fail(self, error: PenstockError) -> None:
        self._failure = error
        self._changed.set()
