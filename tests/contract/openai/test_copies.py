"""A session goes on, with what was recorded of it, at another generator when its own is gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import numpy as np
import pytest
from openai import APIStatusError, NotFoundError

from tests.contract.openai.test_placement import HELLO, fleet, model, turn
from tests.contract.openai.test_sessions import view
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


async def owner_of(fronts: list[Bench], session: str) -> Bench:
    """Who has a session; asking does not move it."""
    owners = []
    for front in fronts:
        with suppress(NotFoundError):
            await state(front, session)
            owners.append(front)
    [owner] = owners
    return owner


@pytest.mark.timeout(120)
async def test_sessions_and_their_siblings_go_on_when_their_generator_is_killed(model: Any) -> None:
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 3)
        fronts = [bench for bench, _ in benches]
        await turn(fronts[0], "a", "task")
        await turn(fronts[1], "a", "task", said("more"))
        await turn(fronts[0], "b", "task")
        await fronts[0].reward("b", 0.25)
        owner = await owner_of(fronts, "a")
        first = [*owner.engine.requests]
        [killed] = [inner for bench, inner in benches if bench is owner]
        await killed.aclose()

        left = [bench for bench in fronts if bench is not owner]
        await turn(left[0], "a", "task", said("more", "and more"))
        new = await owner_of(left, "a")
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
        assert new.copies["taken"] == 2


@pytest.mark.timeout(120)
async def test_what_went_to_another_generator_is_the_former_one_s_no_longer(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 2)
        fronts = [bench for bench, _ in benches]
        for session in ("a", "b", "c"):
            await turn(fronts[0], session, "task")
        owner = await owner_of(fronts, "a")
        [other] = [bench for bench in fronts if bench is not owner]
        # Both are finished, and their group waits to be put.
        owner.loop_task.cancel()
        for session in ("a", "b"):
            await fronts[0].reward(session, 0.5)

        # It seems gone, as one that is held for a while does; so another one goes on with its sessions.
        async def is_gone(_owner: str) -> bool:
            return False

        monkeypatch.setattr(other.endpoint._copies, "_is_alive", is_gone)
        assert (await state(other, "c"))["turns"] == 1
        await until(lambda: other.outcomes["put"] == 2)

        # Of nobody who is no peer.
        query = {"session": "x", "task": "", "owner": "127.0.0.1:1#x"}
        refused = await other.client().post("/copies", cast_to=object, body={}, options={"params": query})
        assert refused == {"is_held": False}

        # It wakes up: what it goes on with is refused, and it puts nothing a second time.
        with pytest.raises(APIStatusError, match="went to another generator") as caught:
            await turn(owner, "c", "task", said("more"), extra_headers=PLACED)
        assert caught.value.status_code == 503
        running = asyncio.create_task(owner.endpoint.run())
        try:
            await until(lambda: owner.outcomes["moved"] == 3)
        finally:
            running.cancel()
        assert owner.outcomes["put"] == 0
