"""Sends finished groups of sessions to the broker, each once; branches left out are counted by reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import structlog

from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.clock import Clock
from penstock.errors import InvalidFieldError, PenstockError
from penstock.process.tasks import set_within
from penstock.security import Security
from penstock.v1 import broker_pb2, types_pb2
from services.generator.openai.formats.api_errors import ApiError
from services.generator.openai.sessions.agent_session import Session
from services.generator.openai.sessions.kept_sessions import KeptSessions
from services.generator.openai.sessions.metrics import OpenAIMetrics
from services.generator.openai.sessions.session_admission import Transit
from services.generator.openai.sessions.session_groups import Finished, SessionGroup, SessionGroups
from services.generator.openai.sessions.session_traces import SessionTraces
from services.generator.openai.sessions.session_trajectories import GroupNames, to_group

POLL_S = 0.5
"""Interval of the search for idle sessions and expired groups."""
PUT = "put"
NOTHING_LEFT = "no_branch"
"""Outcome of sessions of which no branch can be trained on; the branches are counted by reason."""
PATIENCE_S = 5.0
RETRY_S = 1.0

_log = structlog.get_logger()


class GroupPutter:
    """Reads the run's limits, and puts groups into the run.

    Args:
        broker: host:port, or a list of several.
        run_id: Id of the run.
        generator_id: Id of this process.
        temperature: Sampling temperature of sessions.
        security: Credentials of the process.
        metrics: Receives the counts.
        traces: Receives the sessions that have ended.
    """

    def __init__(
        self,
        broker: str,
        *,
        run_id: str,
        generator_id: str,
        temperature: float,
        security: Security,
        metrics: OpenAIMetrics,
        traces: SessionTraces,
    ) -> None:
        self._client = BrokerClient(broker, security=security, patience_s=PATIENCE_S)
        self._run_id = run_id
        self._generator_id = generator_id
        self._temperature = temperature
        self._metrics = metrics
        self._traces = traces
        self._limits: broker_pb2.RunLimits | None = None
        self.transit = Transit()
        """Groups in transit to the broker."""
        self._news = asyncio.Event()
        self._idle = asyncio.Event()

    async def limits(self) -> broker_pb2.RunLimits:
        """The run's limits; requested once. Raises PenstockError while the broker does not know the run."""
        if self._limits is None:
            self._limits = (await self.get_run()).limits
        return self._limits

    async def get_run(self) -> broker_pb2.GetRunResponse:
        """The run's limits and counters; raises PenstockError."""
        return await self._client.get_run(self._run_id)

    def notify(self) -> None:
        """Wake the sender: a session has finished."""
        self._idle.clear()
        self._news.set()

    async def run(
        self,
        groups: SessionGroups,
        *,
        text_of: Callable[[Sequence[int]], str],
        run_history: Callable[[], int | None],
        kept: KeptSessions,
        clock: Clock,
    ) -> None:
        """Put groups as they become ready, until cancelled; without sessions that are no longer this generator's."""
        groups.on_dropped = self._traces.record_dropped
        while True:
            try:
                async with TrajectorySession(
                    self._client, run_id=self._run_id, producer_id=self._generator_id
                ) as session:
                    while True:
                        self._news.clear()
                        groups.expire(clock.monotonic_s())
                        await _report(groups, kept)
                        while (group := groups.take()) is not None:
                            self._idle.clear()
                            self.transit.num_taken += 1
                            try:
                                names = self._names(group, text_of, epoch_s=clock.now_s() - clock.monotonic_s())
                                await self._leave_out(group, kept)
                                await self._put(session, group, names, kept, run_history=run_history())
                                await kept.report_ends()
                            finally:
                                self.transit.num_settled += 1
                        self._metrics.follow(groups)
                        self._idle.set()
                        await set_within(self._news, POLL_S)
            except PenstockError as error:
                _log.warning("groups of agents cannot be put", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Put all ready groups; returns whether all were stored within `timeout_s` seconds."""
        self.notify()
        return await set_within(self._idle, timeout_s)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    def _names(self, group: SessionGroup, text_of: Callable[[Sequence[int]], str], *, epoch_s: float) -> GroupNames:
        return GroupNames(
            group_id=group.group_id,
            generator_id=self._generator_id,
            temperature=self._temperature,
            text_of=text_of,
            epoch_s=epoch_s,
            traceparent=self._traces.traceparent(group.group_id),
        )

    async def _leave_out(self, group: SessionGroup, kept: KeptSessions) -> None:
        gone = await kept.gone(_ids(group.finished))
        for done in group.finished:
            if (reason := gone.get(done.session.session_id)) is not None:
                self._metrics.end_sessions(reason, 1)
                self._traces.record_dropped(done.session, group.group_id, reason)
        group.finished = [done for done in group.finished if done.session.session_id not in gone]

    async def _put(
        self,
        session: TrajectorySession,
        group: SessionGroup,
        names: GroupNames,
        kept: KeptSessions,
        *,
        run_history: int | None,
    ) -> None:
        def lose(finished: Sequence[Finished], reason: str) -> None:
            self._metrics.end_sessions(reason, len(finished))
            kept.note_end(_ids(finished), reason)
            for done in finished:
                self._traces.record_dropped(done.session, group.group_id, reason)

        rewound = [done for done in group.finished if done.session.run_history not in (None, run_history)]
        lose(rewound, "rewound")
        group.finished = [done for done in group.finished if done not in rewound]
        if not group.finished:
            return
        made = to_group(group, limits=await self.limits(), names=names, on_dropped=self._metrics.drop_branches)
        if made is None:
            kept.note_end(_ids(group.finished), NOTHING_LEFT)
            return
        try:
            refusal = await self._send(session, *made)
        except PenstockError as error:
            # A retry would not help: the run is closed, or does not accept the group.
            lose(group.finished, error.reason.lower())
            if not isinstance(error, InvalidFieldError):
                raise
        else:
            if refusal is None:
                self._metrics.end_sessions(PUT, len(group.finished))
                kept.note_end(_ids(group.finished), PUT)
            else:
                lose(group.finished, refusal.reason.lower())

    async def _send(
        self, stream: TrajectorySession, made: types_pb2.TrajectoryGroup, sessions: Sequence[Session]
    ) -> types_pb2.ItemError | None:
        """Why the broker refused the group, if it did."""
        receipt = await stream.store([made])
        if receipt.refused:
            error = receipt.refused[0]
            _log.warning("a group of agents was refused", group_id=made.prompt.group_id, message=error.message)
            return error
        self._metrics.trajectories.inc(receipt.num_samples)
        self._traces.record_put(made, sessions)
        return None


def _ids(finished: Iterable[Finished]) -> list[str]:
    return [done.session.session_id for done in finished]


async def _report(groups: SessionGroups, kept: KeptSessions) -> None:
    """Tell the broker which sessions have ended otherwise, and which are in another group now."""
    for reason, session_ids in groups.take_ended().items():
        kept.note_end(session_ids, reason)
    await kept.report_ends()
    for session in groups.take_regrouped():
        stored = groups.stored(session)
        if stored is not None:
            with suppress(ApiError):
                await kept.store(stored)
