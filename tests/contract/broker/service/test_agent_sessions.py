"""Agents' sessions over real gRPC, on every store."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.clients.sessions import SessionClient
from penstock.errors import InvalidFieldError, SessionMovedError
from tests.helpers.brokers.agent_sessions import agent_turn, put_session
from tests.helpers.brokers.broker import RUN, RunningBroker


async def test_another_generator_gets_every_turn_once_and_the_former_one_is_refused(broker: RunningBroker) -> None:
    await broker.open()
    assert (await put_session(broker, "a", owner="one", num_turns=2)).num_turns == 2
    # Resent, with one more; then with a gap.
    assert (await put_session(broker, "a", owner="one", first_turn=1, num_turns=2)).num_turns == 3
    assert (await put_session(broker, "a", owner="one", first_turn=9)).num_turns == 3
    await put_session(broker, "b", owner="one")
    address = f"127.0.0.1:{broker.server.port}"
    async with SessionClient(address, run_id=RUN, generator_id="two", patience_s=5) as other:
        frames = [frame async for frame in other.take(session_id="a")]
        assert [frame.WhichOneof("frame") for frame in frames] == ["session", *["turn"] * 3, "session", "turn"]
        assert [frame.turn for frame in frames[1:4]] == [agent_turn(number) for number in range(3)]
        with pytest.raises(SessionMovedError):
            await put_session(broker, "a", owner="one", first_turn=3)
        assert await other.gone(["a", "never"]) == {"never": True}
        await other.end(["a"], "put")
        await other.end(["b"], "idle")
        with pytest.raises(InvalidFieldError, match="outcome"):
            await other.end(["b"], "No Reason")
    found = (await broker.audit()).sessions
    assert (found.opened, found.put, dict(found.dropped), found.open) == (2, 1, {"idle": 1}, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"session": {"session_id": "x" * 200}}, "session.session_id"),
        ({"session": {"reward": float("nan")}}, "session.reward"),
        ({"session": {"components": {str(number): 0.0 for number in range(65)}}}, "session.components"),
        ({"keep_for": {"seconds": 8 * 24 * 3600}}, "keep_for"),
        ({"turns": [{"token_ids": b"1"}]}, "turns.token_ids"),
        ({"turns": [{"token_ids": bytes(4), "logprobs": bytes(8)}]}, "turns.logprobs"),
        ({"turns": [{"parent": 1, "token_ids": bytes(4)}]}, "turns.parent"),
        ({"first_turn": 512}, "at most 512"),
        ({"turns": [{"unsaid": "x" * (9 * 1024 * 1024)}]}, "bytes in one request"),
    ],
)
async def test_what_no_session_can_be_is_refused_by_name(
    broker: RunningBroker, changes: dict[str, Any], said: str
) -> None:
    await broker.open()
    with pytest.raises(InvalidFieldError, match=said):
        await put_session(broker, "a", owner="one", **changes)
    assert not (await broker.audit()).HasField("sessions")
