"""Reports the lengths of finished completions to the scheduler, so that it can forecast. Nothing ever waits for it.

Lengths are batched and sent periodically; the scheduler knows the prompts of the groups whose lengths were requested.
While it is unavailable, retries become rarer; the newest MAX_KEPT lengths are kept, older ones discarded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from penstock.errors import PenstockError
from penstock.network.rpc import backoff_s, call, open_channel
from penstock.security import Security
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

MAX_KEPT = 16_384
MAX_PER_CALL = 4_096
REPORT_EVERY_S = 1.0
MAX_BACKOFF_S = 30.0
TIMEOUT_S = 1.0

Length = tuple[str, str, int]
"""Run, group, completion tokens of one sample."""

_log = structlog.get_logger()


class LengthReporter:
    """Reports to one scheduler.

    Args:
        target: Its host:port; None without a scheduler, when nothing is kept.
        security: Credentials of the process.
        on_report: Called with the outcome of lengths and their number: reported, refused or forgotten.
    """

    def __init__(
        self,
        target: str | None,
        *,
        security: Security,
        on_report: Callable[[str, int], None] = lambda outcome, count: None,
    ) -> None:
        self._peer = f"scheduler {target}"
        self._channel = open_channel(target, security) if target else None
        self._on_report = on_report
        self._kept: deque[Length] = deque()

    def note(self, run_id: str, group_id: str, num_tokens: int) -> None:
        """Note that a sample of this group finished with this many completion tokens."""
        if self._channel is None:
            return
        if len(self._kept) >= MAX_KEPT:
            self._kept.popleft()
            self._on_report("forgotten", 1)
        self._kept.append((run_id, group_id, num_tokens))

    async def run(self) -> None:
        """Report until cancelled."""
        delays_s = backoff_s(first_s=REPORT_EVERY_S, most_s=MAX_BACKOFF_S)
        while True:
            if await self._report():
                delays_s = backoff_s(first_s=REPORT_EVERY_S, most_s=MAX_BACKOFF_S)
                await asyncio.sleep(REPORT_EVERY_S)
            else:
                await asyncio.sleep(next(delays_s))

    async def close(self) -> None:
        """Report what is left, if that is quick, and close the connection."""
        if self._channel is not None:
            await self._report()
            await self._channel.close()

    async def _report(self) -> bool:
        """Send the pending lengths; returns whether the scheduler took all of them, or there were none."""
        while self._kept:
            # Removed before the call: lengths that arrive meanwhile may evict the oldest.
            run_id, part, others = self._kept[0][0], list[Length](), deque[Length]()
            for length in self._kept:
                (part if length[0] == run_id and len(part) < MAX_PER_CALL else others).append(length)
            self._kept = others
            outcome = await self._send(run_id, part)
            if outcome == "failed":
                self._put_back(part)
            if outcome != "reported":
                return False
        return True

    async def _send(self, run_id: str, lengths: Sequence[Length]) -> str:
        """The outcome: reported, refused or failed."""
        assert self._channel is not None
        request = scheduler_pb2.ReportLengthsRequest(run_id=run_id)
        for _, group_id, num_tokens in lengths:
            query = scheduler_pb2.LengthQuery(group_id=group_id)
            request.observations.add(query=query, num_completion_tokens=num_tokens)
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        try:
            await call(stub.ReportLengths, request, peer=self._peer, timeout_s=TIMEOUT_S)
        except PenstockError as error:
            if error.is_retryable:
                return "failed"
            _log.warning("lengths were refused", run_id=run_id, num_lengths=len(lengths), error=str(error))
            self._on_report("refused", len(lengths))
            return "refused"
        self._on_report("reported", len(lengths))
        return "reported"

    def _put_back(self, lengths: Sequence[Length]) -> None:
        room = MAX_KEPT - len(self._kept)
        kept = lengths[max(0, len(lengths) - room) :]
        self._kept.extendleft(reversed(kept))
        if len(kept) < len(lengths):
            self._on_report("forgotten", len(lengths) - len(kept))
