"""The OpenAI endpoint of a generator of the model: stores sessions at the broker, takes others over, ends them.

What it was told by the broker it checks against the ledger; a process that has died may wake up and go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SessionMovedError
from penstock.v1 import sessions_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_array, int32_bytes
from penstock.wire.timestamps import duration
from tests.helpers.broker_model.generator import ModelGenerator
from tests.helpers.broker_model.session_ledger import Ended, Kept, SessionLedger, changed
from tests.helpers.broker_model.world import RUN, World

LIVING_S = 1.0
"""A generator that was heard so lately keeps what it has."""
SILENT_S = 12.0
"""One that was not heard for so long does not: a lease, what brokers take to hear of it from another, a margin."""


@dataclass(slots=True)
class Local:
    """A session in an endpoint's memory."""

    task: str
    is_named: bool
    turns: list[int] = field(default_factory=list)
    num_stored: int = 0
    reward: float | None = None


@dataclass(slots=True)
class Process:
    """What one process of an endpoint knows."""

    generator_id: str
    sessions: dict[str, Local] = field(default_factory=dict)
    heard_s: float = -1e9
    """When it was heard last, by the run's clock."""
    back_s: float = -1e9
    """When it was heard again after a silence: brokers learn of beats elsewhere a second later, of hellos at once."""
    is_draining: bool = False


class ModelEndpoint:
    """One endpoint; its process may die, and former ones may wake up."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.generator = ModelGenerator(world, number)
        self.process = Process(self.generator.generator_id)
        self.former: list[Process] = []

    @property
    def ledger(self) -> SessionLedger:
        """What all endpoints know; another one after the store lost commits."""
        return self.world.truth.sessions

    async def see(self) -> None:
        """Settle what is unsure by what the broker has."""
        state = await self.world.state()
        found = {
            session_id: (
                record.generator_id,
                record.num_turns,
                record.session.reward if record.session.HasField("reward") else None,
            )
            for session_id, record in state.sessions.items()
        }
        clock = self.world.store_time.read()
        self.ledger.see(found, clock, before_gap=self.world.store_time.before_gap or clock)

    def beat(self, *, is_draining: bool = False) -> None:
        """Send a heartbeat; the first of a process also says whom it replaces."""
        if not self.generator.is_connected and self.generator.replaces:
            self.ledger.release(self.generator.replaces)
        self.process.is_draining = is_draining
        self.generator.version = 0
        self.generator.beat(slots=0, is_draining=is_draining)

    def note_heard(self) -> None:
        """The last heartbeat had time to arrive."""
        if self.generator.is_connected:
            now_s, process = self.world.store_time.read().now_s, self.process
            if -1e9 < process.heard_s < now_s - 2 * LIVING_S:
                process.back_s = now_s
            process.heard_s = now_s

    async def die(self, *, is_known: bool) -> None:
        """Crash, and start again."""
        await self.generator.die(is_known=is_known)
        self.former.append(self.process)
        self.process = Process(self.generator.generator_id)

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def store(
        self,
        process: Process,
        session_id: str,
        *,
        keep_s: float = 600.0,
        dies_after_s: float | None = None,
        leaves_out: int = 0,
    ) -> None:
        """Store what is new of a session; `leaves_out` more turns of it are taken for stored than are."""
        local = process.sessions[session_id]
        first = max(0, min(len(local.turns), local.num_stored + leaves_out))
        while True:
            request = _request(process, session_id, local, first, keep_s)
            await self.see()
            before = self.ledger.kept.get(session_id)
            after = self._after_put(request, before, local, first, keep_s)
            if after is not None:
                self.ledger.allow(session_id, after)
            try:
                response = await self._asked("PutSession", request, dies_after_s)
            except SessionMovedError:
                await self.see()
                now = self.ledger.kept.get(session_id)
                assert now is None or now.owner != process.generator_id, f"{session_id}: {process} has it, {now}"
                assert now is not None or first > 0, f"{session_id} could have begun"
                process.sessions.pop(session_id, None)
                return
            if response is None:
                return
            assert not response.refusal
            await self.see()
            now = self.ledger.kept.get(session_id)
            assert now is not None, f"{session_id} was stored, and is gone"
            assert now.owner == process.generator_id, f"{session_id} of {now.owner} was stored by {process}"
            assert response.num_turns == len(now.turns)
            local.num_stored = first = response.num_turns
            if first >= len(local.turns):
                return

    def _after_put(
        self, request: sessions_pb2.PutSessionRequest, before: Kept | None, local: Local, first: int, keep_s: float
    ) -> Kept | None:
        """The session once the request is stored; None if it must not be."""
        num_before = 0 if before is None else len(before.turns)
        if before is not None and before.owner != request.generator_id:
            return None
        if first > num_before:
            return None
        return Kept(
            owner=request.generator_id,
            task=local.task,
            is_named=local.is_named,
            turns=(*(() if before is None else before.turns), *local.turns[num_before:]),
            reward=local.reward,
            put_s=self.world.store_time.read().now_s,
            keep_s=keep_s,
        )

    # -- taking over ---------------------------------------------------------------------------------------------------

    async def take(
        self,
        process: Process,
        owners: Iterable[Process],
        *,
        session_id: str = "",
        task: str = "",
        idle_s: float | None = None,
        dies_after_s: float | None = None,
    ) -> None:
        """Take over a session, those of a task, and those that were not stored for so long."""
        request = sessions_pb2.TakeSessionsRequest(
            run_id=RUN, generator_id=process.generator_id, session_id=session_id, task=task
        )
        if idle_s is not None:
            request.idle_for.CopyFrom(duration(idle_s))
        await self.see()
        now_s = self.world.store_time.read().now_s
        asked = self.ledger.kept.get(session_id)
        task = task or (asked.task if asked is not None and asked.is_named else "")
        by_id = {each.generator_id: each for each in owners}
        must, may = set[str](), set[str]()
        for name, kept in self.ledger.kept.items():
            is_wanted = kept is asked or (task and kept.is_named and kept.task == task)
            is_idle = idle_s is not None and now_s - kept.put_s >= idle_s - 1.0
            if is_wanted or is_idle:
                verdict = self._is_free(kept.owner, by_id, process)
                may |= {name} if verdict is not False else set()
                must |= {name} if verdict and (is_wanted or now_s - kept.put_s >= (idle_s or 0.0) + 1.0) else set()
        for name in may:
            self.ledger.allow(name, changed(self.ledger.kept[name], owner=process.generator_id))
        frames = await self._answered(
            lambda: self.world.ask(lambda broker: broker.take_sessions(request), at=self.generator.number),
            dies_after_s,
        )
        if frames is None:
            return
        await self.see()
        found = self._read(frames, process)
        gone = must - self.ledger.kept.keys()
        assert must - gone <= found.keys() <= may, f"{sorted(found)}; must {sorted(must)}, may {sorted(may)}"
        if asked is not None and session_id not in found and session_id in self.ledger.kept:
            [holder] = [frame.holder for frame in frames if frame.HasField("holder")]
            assert holder.generator_id == asked.owner

    def _is_free(self, owner: str, by_id: dict[str, Process], caller: Process) -> bool | None:
        """Whether a session of this owner may be taken; None where that is for the broker to say."""
        clock = self.world.store_time.read()
        if owner in ("", caller.generator_id):
            return True
        process = by_id.get(owner)
        heard_s = -1e9 if process is None else process.heard_s
        is_heard = (
            process is not None and clock.now_s - heard_s <= LIVING_S and clock.now_s - process.back_s > 2 * LIVING_S
        )
        if process is not None and is_heard and not process.is_draining:
            return None if self.world.has_lately_lost(clock.now_s) else False
        if clock.now_s - max(heard_s, clock.unbroken_since_s) > SILENT_S:
            return True
        return None

    def _read(self, frames: list[sessions_pb2.TakeSessionsResponse], process: Process) -> dict[str, Local]:
        """The sessions of an answer, each as the ledger has it."""
        found: dict[str, Local] = {}
        heads: list[sessions_pb2.TakenSession] = []
        for frame in frames:
            if frame.HasField("session"):
                heads.append(frame.session)
                stated = frame.session.session
                found[stated.session_id] = Local(
                    task=stated.task,
                    is_named=stated.has_named_task,
                    reward=stated.reward if stated.HasField("reward") else None,
                )
            elif frame.HasField("turn"):
                [serial] = int32_array(frame.turn.token_ids, "token_ids").tolist()
                found[heads[-1].session.session_id].turns.append(serial)
        for head in heads:
            session_id = head.session.session_id
            local, kept = found[session_id], self.ledger.kept[session_id]
            assert head.num_turns == len(local.turns)
            assert tuple(local.turns) == kept.turns, f"{session_id}: {local.turns} instead of {kept.turns}"
            assert (local.task, local.is_named, local.reward) == (kept.task, kept.is_named, kept.reward)
            local.num_stored = len(local.turns)
            process.sessions.setdefault(session_id, local)
        return found

    # -- the end -------------------------------------------------------------------------------------------------------

    async def check(self, process: Process, session_ids: list[str]) -> None:
        """Which of these are not this process's."""
        await self.see()
        kept = self.ledger.kept
        request = sessions_pb2.CheckSessionsRequest(
            run_id=RUN, generator_id=process.generator_id, session_ids=session_ids
        )
        response = await self.world.call("CheckSessions", request, at=self.generator.number)
        await self.see()
        moved = [name for name in session_ids if name not in kept or kept[name].owner != process.generator_id]
        assert list(response.moved_ids) == moved
        assert list(response.ended_ids) == [name for name in moved if name not in kept]

    async def end(
        self, process: Process, session_ids: list[str], outcome: str, *, dies_after_s: float | None = None
    ) -> None:
        """End sessions; those of others stay."""
        await self.see()
        kept = self.ledger.kept
        own = [name for name in session_ids if name in kept and kept[name].owner == process.generator_id]
        for name in own:
            self.ledger.allow(name, Ended(outcome=outcome))
        request = sessions_pb2.EndSessionsRequest(
            run_id=RUN, generator_id=process.generator_id, session_ids=session_ids, outcome=outcome
        )
        response = await self._asked("EndSessions", request, dies_after_s)
        await self.see()
        for name in session_ids:
            process.sessions.pop(name, None)
        if response is not None:
            assert response.num_ended <= len(own)
            assert not kept.keys() & set(own), "a session was ended, and is there"

    async def _asked(self, method: str, request: Any, dies_after_s: float | None) -> Any:
        return await self._answered(lambda: self.world.call(method, request, at=self.generator.number), dies_after_s)

    async def _answered(self, question: Callable[[], Awaitable[Any]], dies_after_s: float | None) -> Any:
        """The answer; None where the process dies before it hears it."""
        if dies_after_s is None:
            return await question()
        asking = asyncio.ensure_future(question())
        await asyncio.sleep(dies_after_s)
        asking.cancel()
        await asyncio.wait([asking])
        await self.die(is_known=False)
        return None


def _request(
    process: Process, session_id: str, local: Local, first: int, keep_s: float
) -> sessions_pb2.PutSessionRequest:
    session = sessions_pb2.AgentSession(
        session_id=session_id, task=local.task, has_named_task=local.is_named, group="g", reward=local.reward
    )
    turns = [
        sessions_pb2.AgentTurn(
            token_ids=int32_bytes([serial]),
            logprobs=float32_bytes([-0.5]),
            policy_versions=encode_versions([0]),
            text="ok",
        )
        for serial in local.turns[first:]
    ]
    return sessions_pb2.PutSessionRequest(
        run_id=RUN,
        generator_id=process.generator_id,
        session=session,
        turns=turns,
        first_turn=first,
        keep_for=duration(keep_s),
    )
