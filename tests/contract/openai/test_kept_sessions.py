"""A session goes on, with what the broker has of it, at another generator when its own is gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APIStatusError

from penstock.clients.sessions import SessionClient
from penstock.errors import ForbiddenError, SessionMovedError
from penstock.v1 import broker_pb2, sessions_pb2
from services.broker.operations import agent_sessions
from services.broker.storage.memory_store import MemoryStore
from tests.contract.openai.test_placement import HELLO, fleet, model, turn
from tests.contract.openai.test_sessions import view
from tests.helpers.brokers.broker import RUN, Generator, serving
from tests.helpers.certificates import issue, make_authority
from tests.helpers.generators.openai_endpoint import END, Bench
from tests.helpers.waiting import until

__all__ = ["model"]
PLACED = {"X-Penstock-Placed": "1"}


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation whose answers were "ok"."""
    found = [*HELLO]
    for text in texts:
        found += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": text}]
    return found


async def state(bench: Bench, session: str) -> Any:
    return await bench.client(default_headers=PLACED).get(f"/sessions/{session}", cast_to=object)


def owner_of(fronts: list[Bench], session: str) -> Bench:
    """Who has a session, by its own memory: asking would move it."""
    [owner] = [bench for bench in fronts if session in bench.endpoint._agents._groups._open]
    return owner


async def books(bench: Bench) -> tuple[int, int, dict[str, int], int]:
    found = (await bench.broker.audit()).sessions
    return found.opened, found.put, dict(found.dropped), found.open


async def test_sessions_and_their_siblings_go_on_when_their_generator_is_killed(model: Any) -> None:
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 3)
        fronts = [bench for bench, _ in benches]
        await turn(fronts[0], "a", "task")
        await turn(fronts[1], "a", "task", said("more"))
        await turn(fronts[0], "b", "task")
        await fronts[0].reward("b", 0.25)
        owner = owner_of(fronts, "a")
        first = [*owner.engine.requests]
        assert await books(owner) == (2, 0, {}, 2)
        [killed] = [inner for bench, inner in benches if bench is owner]
        await killed.aclose()

        left = [bench for bench in fronts if bench is not owner]
        await turn(left[0], "a", "task", said("more", "and more"))
        new = owner_of(left, "a")
        assert (await state(new, "a"))["turns"] == 3
        # The exact tokens of both turns before, and what was added.
        [request] = new.engine.requests
        before = list(first[1].prompt_token_ids)
        assert list(request.prompt_token_ids)[: len(before)] == before
        await left[1].reward("a", 1.0)
        [group] = await new.groups(1)
        by_reward = {sample.score.value: sample for sample in group.trajectories}
        assert sorted(by_reward) == [0.25, 1.0]
        _, ids, mask, logprobs, versions = view(group, [*by_reward].index(1.0))
        # Three answers of "ok" and the end, each sampled once, with what the first generator recorded.
        sampled = [token_id for token_id, counts in zip(ids, mask, strict=True) if counts]
        assert owner.tokenizer.decode(sampled) == f"ok{END}" * 3
        assert next(logprob for logprob, counts in zip(logprobs, mask, strict=True) if counts) == np.float32(-0.01)
        assert set(versions) == {0}
        await until(lambda: new.outcomes["put"] == 2)
        assert new.records["taken"] == 2
        await turn(new, "c", "task")
        await new.client().delete("/sessions/c", cast_to=object)
        for _ in range(200):
            if (await books(new))[3] == 0:
                break
            await asyncio.sleep(0.05)
        assert await books(new) == (3, 2, {"abandoned": 1}, 0)


async def test_a_session_is_one_generator_s_and_goes_to_another_once_that_is_gone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        fronts = [bench for bench, _ in await fleet(stack, model, 2)]
        for session in ("a", "b", "c"):
            await turn(fronts[0], session, "task")
        owner = owner_of(fronts, "a")
        [other] = [bench for bench in fronts if bench is not owner]
        # Both are finished, and their group waits to be put.
        owner.loop_task.cancel()
        for session in ("a", "b"):
            await fronts[0].reward(session, 0.5)

        # While the broker hears its owner, nobody else goes on with it.
        owner_id = f"gen-{fronts.index(owner)}"
        with pytest.raises(APIStatusError, match=f"is at generator {owner_id}") as caught:
            await state(other, "c")
        assert caught.value.status_code == 409
        # Its successor says that its process has ended.
        successor = Generator.connect(owner.broker.channel, "successor", replaces=owner_id)
        successor.beat()
        await successor.idle_reason()
        assert (await state(other, "c"))["turns"] == 1
        await until(lambda: other.outcomes["put"] == 2)

        # It was only held up: what it goes on with is refused, and it puts nothing a second time.
        with pytest.raises(APIStatusError, match="went to another generator") as caught:
            await turn(owner, "c", "task", said("more"), extra_headers=PLACED)
        assert caught.value.status_code == 503
        running = asyncio.create_task(owner.endpoint.run())
        try:
            await until(lambda: owner.outcomes["moved"] == 3)
        finally:
            running.cancel()
        assert owner.outcomes["put"] == 0


async def test_a_group_whose_generator_died_before_it_heard_that_it_is_stored_counts_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 2)
        fronts = [bench for bench, _ in benches]
        for session in ("a", "b"):
            await turn(fronts[0], session, "task")
        owner = owner_of(fronts, "a")
        [other] = [bench for bench in fronts if bench is not owner]

        kept = owner.endpoint._kept

        async def dies() -> None:
            if kept._ended:
                await asyncio.Event().wait()

        monkeypatch.setattr(kept, "report_ends", dies)
        for session in ("a", "b"):
            await fronts[0].reward(session, 1.0)
        [group] = await owner.groups(1)
        [killed] = [inner for bench, inner in benches if bench is owner]
        await killed.aclose()
        assert await books(other) == (2, 0, {}, 2)

        # A sibling brings what the broker still has of its task: it is put again, by the same name.
        await turn(other, "c", "task")
        await until(lambda: other.outcomes["put"] == 2)
        audit = await other.broker.audit()
        assert (audit.submitted, audit.in_flight, len(group.trajectories)) == (2, 2, 2)
        assert await books(other) == (3, 2, {}, 1)


async def test_a_repeated_request_gets_its_answer_also_from_another_generator(model: Any) -> None:
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 2)
        fronts = [bench for bench, _ in benches]
        headers = {"X-Penstock-Session": "a", "X-Penstock-Group": "task"}

        async def ask(bench: Bench, *texts: str, stream: bool, key: str) -> list[Any]:
            answer = await bench.client(default_headers=headers).chat.completions.create(
                model="tiny",
                messages=said(*texts),  # type: ignore[arg-type]
                stream=stream,
                logprobs=True,
                extra_headers={"Idempotency-Key": key},
            )
            return [part async for part in answer] if stream else [answer]

        whole = await ask(fronts[0], stream=False, key="1")
        parts = await ask(fronts[0], "more", stream=True, key="2")
        owner = owner_of(fronts, "a")
        [other] = [bench for bench in fronts if bench is not owner]
        [killed] = [inner for bench, inner in benches if bench is owner]
        await killed.aclose()

        assert await ask(other, stream=False, key="1") == whole
        again = await ask(other, "more", stream=True, key="2")
        assert _text(again) == _text(parts) != ""
        assert {(part.id, part.created) for part in again} == {(part.id, part.created) for part in parts}
        # Nothing was sampled a second time, and the turn that followed the first one stands.
        assert not other.engine.requests
        found = await state(other, "a")
        assert (found["turns"], found["branches"], found["turns_not_taken"]) == (2, 1, 0)
        with pytest.raises(APIStatusError, match="came with another request"):
            await ask(other, "more", stream=False, key="1")


def _text(parts: list[Any]) -> str:
    return "".join(choice.delta.content or "" for part in parts for choice in part.choices)


async def test_an_answer_does_not_wait_for_room_at_the_broker(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_sessions, "MAX_RUN_BYTES", 10)
    async with AsyncExitStack() as stack:
        [(bench, _)] = await fleet(stack, model, 1)
        await turn(bench, "a", "task")
        assert bench.records["refused"] == 1
        monkeypatch.setattr(agent_sessions, "MAX_RUN_BYTES", 1_000_000)
        await turn(bench, "a", "task", said("more"))
        assert bench.records["stored"] == 1
        kept = bench.broker.run_registry.replica(RUN).copy
        assert kept is not None
        assert kept.sessions["a"].num_turns == 2


async def test_sessions_are_open_to_the_generators_of_their_run_alone(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    async with serving(MemoryStore(), security=issue(authority, name="broker")) as broker, AsyncExitStack() as stack:
        target = f"127.0.0.1:{broker.server.port}"
        for run_id in (RUN, "other"):
            await broker.open(run_id=run_id)

        async def client(role: str, run: str, *, claims: str = RUN, name: str = "gen") -> SessionClient:
            security = issue(authority, roles=[role], run=run, name=f"{name}-{role}-{run}")
            generator_id = f"{name}-{role}-{run}-1"
            made = SessionClient(target, run_id=claims, generator_id=generator_id, security=security, patience_s=1)
            return await stack.enter_async_context(made)

        own = await client("generator", RUN)
        session = sessions_pb2.AgentSession(session_id="s", task="t", group="g", has_named_task=True)
        answer = sessions_pb2.AgentTurn(token_ids=b"\1\0\0\0", logprobs=bytes(4), text="ok")
        answer.policy_versions.versions, answer.policy_versions.lengths = bytes(8), b"\1\0\0\0"
        assert await own.put(session, [answer], first_turn=0, keep_s=60) == 1

        for liar in (await client("generator", "other"), await client("environment", RUN)):
            with pytest.raises(ForbiddenError, match="not open to"):
                [frame async for frame in liar.take(session_id="s", task="t")]
            with pytest.raises(ForbiddenError, match="not open to"):
                await liar.put(session, [], first_turn=1, keep_s=60)
        elsewhere = await client("generator", "other", claims="other", name="else")
        assert [frame async for frame in elsewhere.take(session_id="s", task="t", idle_s=0.0)] == []
        with pytest.raises(SessionMovedError):
            await elsewhere.put(session, [], first_turn=1, keep_s=60)
        head, turn_frame = [frame async for frame in own.take(session_id="s")]
        assert (head.session.num_turns, turn_frame.turn) == (1, answer)
        audit = await broker.call("AuditRun", broker_pb2.AuditRunRequest(run_id="other"))
        assert not audit.audit.HasField("sessions")
