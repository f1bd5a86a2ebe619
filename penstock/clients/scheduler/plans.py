"""Follows the plan of a run at the scheduler, across its restarts; a scheduler that is away never matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from penstock.errors import PenstockError, UnknownRunError
from penstock.network.rpc import backoff_s, open_channel, translated_errors
from penstock.process.logger import get_logger
from penstock.security import Security
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc

_log = get_logger()
# A stream is reopened from time to time: nothing waits forever on a silent peer.
_STREAM_TIMEOUT_S = 600.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0


async def watch_plan(scheduler: str, run_id: str, *, security: Security) -> AsyncGenerator[pb.Plan | None, None]:
    """The plan in force and each revision, endlessly; None each time the scheduler reports that there is none.

    The plan in force is repeated after each new connection.
    """
    delays_s = backoff_s(first_s=_FIRST_RETRY_S, most_s=_LONGEST_RETRY_S)
    async with open_channel(scheduler, security) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while True:
            try:
                async with translated_errors(f"scheduler {scheduler}"):
                    stream: Any = stub.WatchPlan(pb.WatchPlanRequest(run_id=run_id), timeout=_STREAM_TIMEOUT_S)
                    async for response in stream:
                        delays_s = backoff_s(first_s=_FIRST_RETRY_S, most_s=_LONGEST_RETRY_S)
                        yield response.plan
            except UnknownRunError:
                yield None
            except PenstockError as error:
                _log.debug("the plan is not being watched", scheduler=scheduler, error=str(error))
            await asyncio.sleep(next(delays_s))
