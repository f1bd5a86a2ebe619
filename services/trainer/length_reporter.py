"""Tells the scheduler how long completions were, so that it can forecast. Without the scheduler nothing stops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import structlog

from penstock.errors import PenstockError
from penstock.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

MAX_KEPT_OBSERVATIONS = 16_384
MAX_OBSERVATIONS_PER_CALL = 4096
REPORT_EVERY_S = 2.0
CALL_TIMEOUT_S = 1.0

_log = structlog.get_logger()


class LengthReporter:
    """Keeps the newest MAX_KEPT_OBSERVATIONS lengths and reports them from time to time; older ones are let go."""

    def __init__(self, *, target: str, run_id: str, security: Security) -> None:
        self._peer = f"scheduler {target}"
        self._channel = open_channel(target, security)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._run_id = run_id
        self._kept: deque[scheduler_pb2.LengthObservation] = deque(maxlen=MAX_KEPT_OBSERVATIONS)

    def note(self, groups: Sequence[types_pb2.TrajectoryGroup]) -> None:
        """Completions of these groups were this long."""
        for group in groups:
            query = scheduler_pb2.LengthQuery(
                group_id=group.prompt.group_id,
                prompt_text=group.prompt.text,
                num_prompt_tokens=len(group.prompt.token_ids) // 4,
            )
            for trajectory in group.trajectories:
                num_tokens = len(trajectory.token_ids) // 4
                self._kept.append(scheduler_pb2.LengthObservation(query=query, num_completion_tokens=num_tokens))

    async def run(self) -> None:
        """Report until cancelled; then report what is left, if that is quick, and close the channel."""
        try:
            while True:
                await asyncio.sleep(REPORT_EVERY_S)
                await self._report()
        finally:
            await self._report()
            await self._channel.close()

    async def _report(self) -> None:
        part = [self._kept.popleft() for _ in range(min(len(self._kept), MAX_OBSERVATIONS_PER_CALL))]
        if not part:
            return
        request = scheduler_pb2.ReportLengthsRequest(run_id=self._run_id, observations=part)
        try:
            await call(self._stub.ReportLengths, request, peer=self._peer, timeout_s=CALL_TIMEOUT_S)
        except PenstockError as error:
            _log.info("lengths were not reported", error=str(error), num_observations=len(part))
