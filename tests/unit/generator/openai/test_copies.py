"""Sessions written down for other generators, and the copies that a generator holds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from services.generator.config import OpenAIConfig
from services.generator.openai.sessions.agent_session import Session
from services.generator.openai.sessions.held_copies import Held, HeldCopies
from services.generator.openai.sessions.session_copy import Reward, SessionCopy, decode_copy, encode_copy
from services.generator.openai.sessions.session_groups import SessionGroups
from tests.unit.generator.openai.test_sessions import session, turn


def branched() -> Session:
    """Two branches, of which one's answer did not arrive."""
    first = turn([1, 2], 3, 4, history=(b"a", b"b"), version=7)
    routes = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    second = turn([5], 6, parent=first, history="text")
    second = replace(second, sampled=replace(second.sampled, routes=routes, is_truncated=True))
    third = turn([8], 9, parent=first, history=b"\1\2", version=8)
    made = session(first, second)
    made.undelivered.add(third)
    made.add(third, [("user", "hé"), ("assistant", "b")])
    return made


def test_a_copy_is_the_session_by_another_machines_clock() -> None:
    made = branched()
    reward = Reward(value=0.5, components={"style": 1.0}, model="m", finish_s=3.0)
    copy = SessionCopy(session=made, group="x-1", reward=reward)
    found = decode_copy(encode_copy(copy, now_s=10.0), now_s=110.0)
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
    for history in ((b"a", b"b", b"c"), "text and more", b"\1\2\3"):
        match, expected = found.session.longest_match(history), made.longest_match(history)
        assert found.session.turns.index(match) == made.turns.index(expected)


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.pop("turns"),
        lambda document: document["turns"][1].update(parent=1),
        lambda document: document["turns"][0].update(token_ids="?"),
        lambda document: document["turns"][0].update(logprobs=""),
        lambda document: document["turns"][1].update(routes=["O", [1], ""]),
    ],
)
def test_a_damaged_copy_is_refused(damage) -> None:
    document = json.loads(encode_copy(SessionCopy(session=branched(), group="g"), now_s=0.0))
    damage(document)
    with pytest.raises(ValueError, match=r"."):
        decode_copy(json.dumps(document).encode(), now_s=0.0)


def test_copies_are_handed_out_once_and_bounded() -> None:
    held = HeldCopies(max_bytes=10)
    one = Held(owner="o", task="t", data=b"12345", put_s=1.0)
    assert held.put("a", one)
    assert held.put("b", replace(one, task="", put_s=2.0))
    assert not held.put("c", one)
    assert held.put("a", replace(one, data=b"1")), "it takes the place of the one before"
    assert held.find("b", "t") == {"o": ["a", "b"]}
    assert [held.find(session_id, "") for session_id in ("a", "b", "c")] == [{"o": ["a"]}, {"o": ["b"]}, {}]
    assert held.older_than(1.5) == {"o": ["a"]}
    assert held.take("another", ["a"]) == []
    assert [each.data for each in held.take("o", ["a", "a"])] == [b"1"]
    assert held.was_taken("o", "a")
    assert not held.was_taken("another", "a"), "whoever goes on with it may copy it here again"
    held.release("another", "b")
    assert len(held) == 1
    held.release("o", "b")
    assert (len(held), held.put("c", replace(one, data=b"0123456789"))) == (0, True)


def test_a_group_goes_on_in_another_process_under_its_own_name() -> None:
    groups, other = (SessionGroups(OpenAIConfig(), group_size=2) for _ in range(2))
    for name in ("a", "b"):
        entered = groups.enter(name, "t", 1.0)
        entered.add(turn([1], 2), [])
        groups.leave(entered, 1.0)
    reward = Reward(value=1.0, components={}, model="m", finish_s=2.0)
    copies = [groups.copy_of(groups.find(name), given) for name, given in (("a", reward), ("b", None))]
    other.restore(copies)
    other.restore(copies)
    assert (other.num_open, other.num_held, other.num_groups) == (1, 2, 1)
    assert other.finish("b", 0.5, 3.0, components={}, model="m")
    group = other.take()
    assert (group.name, [done.reward for done in group.finished]) == (copies[0].group, [1.0, 0.5])
    # One of which nobody is finished may have lost members that were put: another name for what is left of it.
    alone = SessionGroups(OpenAIConfig(), group_size=2)
    alone.restore([copies[1]])
    [left] = alone._groups.values()
    assert left.name != copies[1].group
