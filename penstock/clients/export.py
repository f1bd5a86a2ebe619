"""Exports a run's trained steps from its broker: ExportTrajectories that survives lost streams and notices rewinds.

Promises: every step is delivered whole at least once, in order; after a lost stream the step under way is sent again
from its beginning, and steps that a rewind made void meanwhile are sent again under a higher history. A step that is no
longer retained is an error (NotRetainedError), never a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any

import grpc

from penstock.clients.streams import read
from penstock.errors import PenstockError, UnknownRunError
from penstock.network.connection import Connection
from penstock.network.outage import Outage
from penstock.network.rpc import backoff_s, explained
from penstock.process.logger import get_logger
from penstock.v1 import broker_pb2, broker_pb2_grpc
from penstock.wire.pieces import MAX_EXPORTED_BYTES, Assembly

SILENCE_LIMIT_S = 20.0
"""The broker sends at least every 5 s."""

_log = get_logger()
_Response = broker_pb2.ExportTrajectoriesResponse


@dataclass
class StepExport:
    """The trained steps of one run."""

    broker: Connection
    _: KW_ONLY
    run_id: str
    follow: bool
    """Continue with each step as it is acknowledged, until the run is closed."""
    next_version: int = 0
    """First step not yet received whole, to begin with the first one wanted; 0 is the oldest one retained."""
    history: int | None = None
    """The run's history counter for the steps before `next_version`; None if the caller has none of them."""
    waits_for_run: bool = False
    """Whether to wait for a run that is not open yet."""
    patience_s: float | None = None
    """How long to wait for a broker that is away; None waits indefinitely."""
    max_groups_per_step: int = 0
    """Groups of each step that are wanted, spread evenly over it; 0 means all."""

    def __post_init__(self) -> None:
        """Get ready to call."""
        self._stub = broker_pb2_grpc.BrokerServiceStub(self.broker.channel)
        self.outage = Outage(self.broker.peer)
        """Whether the broker is away; `on_notice` may be set."""

    async def responses(self) -> AsyncGenerator[_Response, None]:
        """Groups and, with `follow`, keep-alive messages, until the export is complete or the run closed.

        Raises:
            NotRetainedError: The next step is no longer retained.
            PenstockError: The broker refused, or was away for longer than `patience_s`.
        """
        loop = asyncio.get_running_loop()
        heard_s, delays = loop.time(), backoff_s()
        while True:
            try:
                async with aclosing(self._one_stream()) as responses:
                    async for response in responses:
                        heard_s, delays = loop.time(), backoff_s()
                        self.outage.answered()
                        self.history = response.history
                        self.next_version = response.policy_version + (not response.HasField("group"))
                        yield response
                return
            except PenstockError as error:
                may_heal = error.is_retryable or (self.waits_for_run and isinstance(error, UnknownRunError))
                is_over = self.patience_s is not None and loop.time() - heard_s > self.patience_s
                if not may_heal or is_over:
                    raise
                _log.debug("export stream lost", peer=self.broker.peer, error=str(error))
                if error.is_retryable:
                    self.outage.failed(error)
            await asyncio.sleep(next(delays))

    async def _one_stream(self) -> AsyncGenerator[_Response, None]:
        request = broker_pb2.ExportTrajectoriesRequest(
            run_id=self.run_id,
            from_policy_version=self.next_version,
            follow=self.follow,
            history=self.history,
            accepts_group_pieces=True,
            max_groups_per_step=self.max_groups_per_step,
        )
        call: Any = self._stub.ExportTrajectories(request)
        peer = self.broker.peer
        assembly = Assembly(max_bytes=MAX_EXPORTED_BYTES)
        try:
            while (response := await read(call, peer=peer, max_silence_s=SILENCE_LIMIT_S)) is not grpc.aio.EOF:
                if not response.HasField("piece"):
                    yield response
                elif (whole := assembly.add(response.piece.data, is_last=response.piece.is_last)) is not None:
                    response.ClearField("piece")
                    response.group.MergeFromString(whole)
                    yield response
        except grpc.aio.AioRpcError as error:
            raise await explained(error, peer=peer) from error
        finally:
            call.cancel()
