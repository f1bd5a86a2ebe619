"""Sessions, groups and trajectories of agents, without a server."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.v1.broker_pb2 import RunLimits
from penstock.wire.codec import decode_versions, int32_array
from penstock.wire.routes import RoutingShape
from services.broker.ingest.trajectory_decoder import read_put
from services.generator.config import OpenAIConfig
from services.generator.openai.formats.api_errors import ApiError
from services.generator.openai.sessions.agent_session import Sampled, Session, Turn, token_ids_of
from services.generator.openai.sessions.session_groups import SessionGroups
from services.generator.openai.sessions.session_trajectories import GroupNames, to_group
from tests.helpers.brokers.trajectories import pack_groups


def sampled(*token_ids, version=0, truncated=False):
    return Sampled(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        versions=np.full(len(token_ids), version, np.int64),
        is_truncated=truncated,
    )


def turn(given_ids, *token_ids, parent=None, history="", **changes):
    ids = np.asarray(given_ids, np.int32)
    return Turn(parent=parent, given_token_ids=ids, sampled=sampled(*token_ids, **changes), history=history, unsaid="")


def session(*turns, name="s"):
    made = Session(session_id=name, task="t", started_s=1.0, last_used_s=2.0)
    for one in turns:
        made.add(one, [])
    return made


def test_the_longest_conversation_that_is_a_beginning_is_gone_on_from():
    short, long = turn([1], 2, history="a"), turn([3], 4, history="ab")
    made = session(long, short)
    assert made.longest_match("abc") is long
    assert made.longest_match("ax") is short
    assert made.longest_match("x") is None
    assert made.longest_match(b"abc") is None


def test_a_kind_of_history_never_matches_another():
    made = session(turn([1], 2, history=(b"a", b"b")))
    assert made.longest_match((b"a", b"b", b"c")) is not None
    assert made.longest_match((b"a",)) is None
    assert made.longest_match("ab") is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=12))
def test_every_sampled_token_is_trained_on_once_and_no_given_one(plan):
    """Whatever tree of turns a client makes."""
    turns, next_id = [], iter(range(1, 10_000))
    for choice, num_given, num_sampled in plan:
        parent = turns[choice] if choice < len(turns) else None
        given_ids = [next(next_id) for _ in range(num_given + (parent is None))]
        turns.append(turn(given_ids, *(next(next_id) for _ in range(num_sampled)), parent=parent))
    made = session(*turns)
    branches, left_out = made.branches(), made.not_taken()
    trained = [int(i) for b in branches for i, is_trained in zip(b.token_ids, b.loss_mask, strict=True) if is_trained]
    assert sorted(trained) == sorted(int(i) for one in turns for i in one.sampled.token_ids if one not in left_out)
    # Whoever gave nothing new asked the same again.
    assert all(any(one is not other and one.request == other.request for other in turns) for one in left_out)
    kept = [one for one in turns if one not in left_out]
    leaves = [one for one in kept if not any(other.parent is one for other in kept)]
    assert [[*b.prompt_token_ids.tolist(), *b.token_ids.tolist()] for b in branches] == [
        token_ids_of(x) for x in leaves
    ]


def session_groups(*, group_size=2, **changes):
    limits = {"max_sessions": 8, "session_idle_s": 10.0, "group_timeout_s": 5.0}
    return SessionGroups(OpenAIConfig(**(limits | changes)), group_size=group_size)


def play(made, name, *, reward=1.0, task="t", now_s=0.0, turns=None):
    """A session from its request to its reward."""
    opened = made.enter(name, task, now_s)
    for one in turns or [turn([1, 2], 3)]:
        opened.add(one, [])
    made.leave(opened, now_s)
    made.finish(name, reward, now_s, components={}, model="m")


def test_sessions_beyond_a_groups_size_make_another():
    made = session_groups()
    for index in range(5):
        play(made, f"s{index}")
    groups = [made.take(), made.take()]
    assert [[d.session.session_id for d in g.finished] for g in groups] == [["s0", "s1"], ["s2", "s3"]]
    assert made.take() is None
    assert made.num_held == 1


def test_a_dropped_session_leaves_its_place_to_another():
    made = session_groups()
    made.enter("gone", "t", 0.0)
    assert made.begins_group("x", "t") is False
    made.drop("gone", "abandoned")
    assert made.begins_group("x", "t") is True
    play(made, "s0")
    play(made, "s1")
    assert len(made.take().finished) == 2


def test_members_that_still_go_on_join_the_next_group():
    made = session_groups(group_size=3)
    open_one = made.enter("open", "t", 0.0)
    play(made, "s0")
    play(made, "s1")
    made.expire(5.1)
    assert len(made.take().finished) == 2
    open_one.add(turn([1], 2), [])
    made.leave(open_one, 6.0)
    made.finish("open", 1.0, 6.0, components={}, model="m")
    for name in ("s2", "s3"):
        play(made, name, now_s=7.0)
    assert len(made.take().finished) == 3
    assert made.dropped == {}


def test_a_busy_session_is_never_idle():
    made = session_groups()
    busy = made.enter("busy", "t", 0.0)
    made.expire(100.0)
    assert made.num_open == 1
    busy.add(turn([1], 2), [])
    made.leave(busy, 100.0)
    made.expire(111.0)
    assert made.dropped == {"idle": 1}


def test_what_is_over_is_over_and_what_is_empty_or_busy_cannot_end():
    made = session_groups()
    with pytest.raises(ApiError, match="no session"):
        made.finishable("nobody")
    opened = made.enter("s", "t", 0.0)
    with pytest.raises(ApiError, match="being answered"):
        made.finishable("s")
    opened.add(turn([1], 2), [])
    made.leave(opened, 0.0)
    assert made.finish("s", 1.0, 0.0, components={}, model="m")
    assert not made.finish("s", 1.0, 0.0, components={}, model="m")
    with pytest.raises(ApiError, match="is over"):
        made.enter("s", "t", 0.0)


def test_a_session_whose_only_request_failed_is_as_if_never_begun():
    made = session_groups(group_size=2)
    given_up = made.enter("s", "t", 0.0)
    made.enter("s", "t", 0.0)
    made.leave(given_up, 1.0)
    assert made.num_open == 1
    made.leave(given_up, 1.0)
    assert (made.num_open, made.num_groups, made.dropped, made.take_ended()) == (0, 0, {}, {})
    again = made.enter("s", "t", 2.0)
    again.add(turn([1], 2), [])
    made.leave(again, 3.0)
    assert made.finish("s", 1.0, 3.0, components={}, model="m")


def group_of(*sessions, group_size=4, max_completion_tokens=64):
    made, dropped = session_groups(group_size=len(sessions)), Counter()
    for index, turns in enumerate(sessions):
        play(made, f"s{index}", reward=float(index), turns=turns)
    limits = RunLimits(group_size=group_size, max_completion_tokens=max_completion_tokens)
    names = GroupNames(
        group_id="g",
        generator_id="gen",
        temperature=1.0,
        text_of=lambda ids: " ".join(map(str, ids)),
        epoch_s=1e9,
    )
    group, _ = to_group(made.take(), limits=limits, names=names, on_dropped=lambda why, n: dropped.update({why: n}))
    return group, {why: n for why, n in dropped.items() if n}


def test_the_broker_takes_what_sessions_become():
    first = turn([1, 2, 3], 4, 5, version=3)
    second = turn([6], 7, parent=first, version=4, truncated=True)
    group, dropped = group_of([first, second], [turn([1, 2, 9], 4, version=4)])
    assert dropped == {}
    (put,) = read_put(pack_groups([group]))
    assert put.fault == ""
    assert (list(put.min_versions), list(put.max_versions), list(put.rewards)) == ([3, 4], [4, 4], [0.0, 1.0])
    trajectory = group.trajectories[0]
    assert int32_array(group.prompt.token_ids, "p").tolist() == [1, 2]
    assert int32_array(trajectory.token_ids, "t").tolist() == [3, 4, 5, 6, 7]
    assert list(trajectory.loss_mask) == [0, 1, 1, 0, 1]
    assert decode_versions(trajectory.policy_versions, num_tokens=5, field="v").tolist() == [3, 3, 3, 3, 4]


def test_what_does_not_fit_a_group_is_left_out_by_reason_and_last_branches_stay():
    root = turn([1], 2)
    branches = [root, *(turn([10 + n], 20 + n, parent=root) for n in range(3))]
    group, dropped = group_of(branches, [turn([1], 2)], group_size=2)
    assert dropped == {"too_many_branches": 2}
    assert [int32_array(t.token_ids, "t").tolist() for t in group.trajectories] == [[2, 12, 22], [2]]
    group, dropped = group_of([turn([1], *range(2, 40))], [turn([1], 2)], [turn([7], 2)], max_completion_tokens=8)
    assert dropped == {"too_long": 1, "no_common_prompt": 1}
    assert len(group.trajectories) == 1


def test_routes_of_turns_join_to_those_of_every_branch():
    """Rows say their position and the turn whose request computed them."""

    def routed(number, given_ids, *token_ids, parent=None):
        num_tokens = len(token_ids_of(parent)) + len(given_ids) + len(token_ids)
        # As an engine answers: of all positions of the request but the last.
        rows = np.array([[[position, number]] for position in range(num_tokens - 1)], np.uint8)
        answer = replace(sampled(*token_ids), routes=rows).without_routes_before(len(given_ids))
        return Turn(parent=parent, given_token_ids=np.array(given_ids, np.int32), sampled=answer, history="", unsaid="")

    first = routed(1, [5, 6, 7], 8, 9)
    second = routed(2, [10, 11], 12, parent=first)
    third = routed(3, [13], 14, 15, parent=first)
    made = session(first, second, third)
    assert [branch.routes[:, 0].tolist() for branch in made.branches()] == [
        # A row is of the turn that its next token was given or sampled in.
        [[0, 1], [1, 1], [2, 1], [3, 1], [4, 2], [5, 2], [6, 2]],
        [[0, 1], [1, 1], [2, 1], [3, 1], [4, 3], [5, 3], [6, 3]],
    ]
    shape = RoutingShape(num_layers=1, num_experts=256, experts_per_token=2)
    group, _ = group_of([first, second, third])
    for trajectory in group.trajectories:
        num_rows = len(group.prompt.token_ids) // 4 + len(trajectory.token_ids) // 4 - 1
        routes = shape.array(trajectory.routes, num_rows=num_rows, field="routes")
        assert routes[:, 0, 0].tolist() == list(range(num_rows))
