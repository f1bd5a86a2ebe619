"""Sessions written down for the broker, and gone on with by another process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.errors import PenstockError
from services.generator.config import OpenAIConfig
from services.generator.openai.sessions.agent_session import Session
from services.generator.openai.sessions.session_groups import SessionGroups
from services.generator.openai.sessions.stored_session import (
    Reward,
    StoredSession,
    read_session,
    write_session,
    write_turns,
)
from tests.unit.generator.openai.test_sessions import session, turn

SAID = [("user", "hé"), ("assistant", "b")]


def branched(beginning: Any = (b"a", b"b"), ends: Any = ((b"c",), (b"d", b"e"))) -> Session:
    """Two branches, of which one's answer did not arrive; the conversation of the first turn is forgotten by then."""
    first = turn([1, 2], 3, 4, history=beginning, version=7)
    routes = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    second = turn([5], 6, parent=first, history=beginning + ends[0])
    sampled = replace(second.sampled, routes=routes, is_truncated=True)
    second = replace(second, sampled=sampled, begun_s=2.5, ended_s=2.75, caller="00-agent")
    third = turn([8], 9, parent=first, history=beginning + ends[1], version=8)
    made = session()
    for number, each in enumerate((first, second, third)):
        if each is third:
            made.undelivered.add(third)
        made.add(each, [*SAID, ("user", str(number)), ("assistant", "c")])
    return made


@pytest.mark.parametrize(
    ("beginning", "ends"), [((b"a",), ((b"c",), (b"d",))), ("te", ("xt", "a")), (b"1", (b"2", b"3"))]
)
def test_what_is_read_is_the_session_by_another_machines_clock(beginning: Any, ends: Any) -> None:
    made = branched(beginning, ends)
    reward = Reward(value=0.5, components={"style": 1.0}, model="m", finish_s=3.0)
    head = write_session(StoredSession(session=made, group="x-1", reward=reward), now_s=10.0)
    # In two calls, as turns come.
    found = read_session(head, [*write_turns(made, 0)[:2], *write_turns(made, 2)], now_s=110.0)
    assert (found.group, found.reward) == ("x-1", replace(reward, finish_s=103.0))
    assert (found.session.started_s, found.session.last_used_s) == (101.0, 102.0)
    assert (found.session.task, found.session.num_bytes, found.session.transcript) == (
        made.task,
        made.num_bytes,
        made.transcript,
    )
    assert len(found.session.not_taken()) == len(made.not_taken()) == 1
    for ours, theirs in zip(made.branches(), found.session.branches(), strict=True):
        for name in ("prompt_token_ids", "token_ids", "logprobs", "versions", "loss_mask", "routes"):
            before, after = getattr(ours, name), getattr(theirs, name)
            assert (before is None) == (after is None)
            if before is not None:
                np.testing.assert_array_equal(before, after)
                assert before.dtype == after.dtype
        assert ours.is_truncated == theirs.is_truncated
    for before, after in zip(made.turns, found.session.turns, strict=True):
        assert (before.history, before.caller) == (after.history, after.caller)
        moved_s = 100.0 if before.begun_s else 0.0
        assert (after.begun_s, after.ended_s) == (before.begun_s + moved_s, before.ended_s + moved_s)
    # What a turn shares with those before is not written again.
    assert [len(each.transcript) for each in write_turns(made, 1)] == [4, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda turns: turns.pop(0),
        lambda turns: turns[1].ClearField("history_token_ids") or turns[1].ClearField("messages"),
        lambda turns: setattr(turns[0], "token_ids", b"?"),
        lambda turns: turns[1].routes_shape.append(3),
    ],
)
def test_a_damaged_session_is_refused(damage: Any) -> None:
    turns = write_turns(branched(), 0)
    damage(turns)
    head = write_session(StoredSession(session=branched(), group="g"), now_s=0.0)
    with pytest.raises((ValueError, IndexError, PenstockError)):
        read_session(head, turns, now_s=0.0)


def test_a_group_goes_on_in_another_process_under_its_own_name() -> None:
    groups, other = (SessionGroups(OpenAIConfig(), group_size=2) for _ in range(2))
    for name in ("a", "b"):
        entered = groups.enter(name, "t", 1.0)
        entered.add(turn([1], 2), [])
        groups.leave(entered, 1.0)
    reward = Reward(value=1.0, components={}, model="m", finish_s=2.0)
    stored = [groups.stored(groups.find(name), given) for name, given in (("a", reward), ("b", None))]
    other.restore(stored)
    other.restore(stored)
    assert (other.num_open, other.num_held, other.num_groups) == (1, 2, 1)
    assert other.finish("b", 0.5, 3.0, components={}, model="m")
    group = other.take()
    assert (group.name, [done.reward for done in group.finished]) == (stored[0].group, [1.0, 0.5])
    # One of which nobody is finished may have lost members that were put: another name for what is left of it.
    alone = SessionGroups(OpenAIConfig(), group_size=2)
    alone.restore([stored[1]])
    [left] = alone._groups.values()
    assert left.name != stored[1].group


def test_what_ended_for_good_is_said_once_and_what_goes_on_elsewhere_is_not() -> None:
    groups = SessionGroups(OpenAIConfig(group_timeout_s=5.0), group_size=3)
    for name in ("moved", "given-up", "open", "done", "also-done"):
        entered = groups.enter(name, "one" if name == "done" else name[:4], 0.0)
        entered.add(turn([1], 2), [])
        groups.leave(entered, 0.0)
    groups.drop("moved", "moved")
    groups.drop("given-up", "abandoned")
    groups.finish("done", 1.0, 0.0, components={}, model="m")
    groups.expire(6.0)
    assert groups.take_ended() == {"abandoned": ["given-up"], "group_incomplete": ["done"]}
    assert groups.take_ended() == {}
    groups.finish("also-done", 1.0, 6.0, components={}, model="m")
    groups.close_all()
    assert groups.take_ended() == {}
