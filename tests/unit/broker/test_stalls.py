"""Who waits for whom: each stall is told in one line, with its owner, since when, and what is due when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from penstock.v1 import broker_pb2
from penstock.wire.timestamps import timestamp
from services.broker.operations import leasing, submission
from services.broker.records_pb2 import WorkerView
from services.broker.stalls import causes
from services.broker.stalls.causes import Present
from services.broker.stalls.stall_report import waiting, waits
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import evaluation
from tests.unit.broker.builders import (
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    make_ready,
    open_state,
    put,
    score,
    submit,
)

NOW_S = 50.0


def view(generator_id: str = "gen-1", *, version: int = 0, heard_s: float = NOW_S) -> broker_pb2.GeneratorView:
    """A connected generator."""
    hello = broker_pb2.GeneratorHello(generator_id=generator_id)
    beat = broker_pb2.GeneratorBeat(policy_version=version)
    return broker_pb2.GeneratorView(hello=hello, beat=beat, beat_time=timestamp(heard_s))


def present(*generators: broker_pb2.GeneratorView, workers: Iterable[str] = ("worker-1",)) -> Present:
    """Who is connected: one generator if none is named."""
    return Present(generators=generators or (view(),), worker_ids=tuple(workers))


def lines(state: RunState, who: Present | None = None, now_s: float = NOW_S) -> list[str]:
    """The waits as `penstock status` would word them."""
    return [f"{wait.waiter} > {wait.owner}: {wait.reason}" for wait in waits(state, who or present(), now_s)]


def nobody(*, workers: Iterable[str] = ("worker-1",)) -> Present:
    """No generator is connected."""
    return Present(generators=(), worker_ids=tuple(workers))


def test_a_run_without_prompts_waits_for_a_submission() -> None:
    assert lines(open_state()) == [
        "trainer > submitter of prompts: no training group is in flight: submit prompts",
        "generator gen-1 > submitter of prompts: "
        "the queue of prompts is empty: nothing was submitted that is not already out",
    ]


def test_without_a_generator_the_queue_says_so() -> None:
    state = open_state()
    submit(state, "a")
    text = "2 of 2 groups are missing; no generator is connected; 1 group waits for one"
    assert lines(state, nobody()) == [f"trainer > generators: {text}"]
    assert "the last one was heard from 20 s ago" in lines(state, present(view(heard_s=NOW_S - 20)))[0]
    [wait] = waits(state, nobody(), NOW_S)
    assert wait.since_time == timestamp(1.0)


def test_a_silent_generator_is_named_with_its_sample_and_what_comes_next() -> None:
    state = open_state()
    submit(state, "a")
    grants = lease(state, 2, now_s=20.0)
    assert put(state, grants[1], [7, 8], now_s=22.0) == []
    who = present(view(heard_s=24.0), view("gen-2"))
    assert lines(state, who, 34.0)[0] == (
        "trainer > generator gen-1: 2 of 2 groups are missing; sample a/0 and 1 more are leased by gen-1, "
        "silent for 10 s, lease ends in 16 s, then another continues from token 0"
    )
    [wait, *_] = waits(state, who, 34.0)
    assert (wait.since_time, wait.deadline_time) == (timestamp(24.0), timestamp(50.0))
    assert "silent for 13 s while gen-1 lives" in lines(state, who, 33.0)[0]
    # A generator nobody remembers is as silent as its sample.
    assert "silent for 19 s" in lines(state, present(view("gen-2")), 39.0)[0]


def test_a_sample_that_grows_is_no_stall() -> None:
    state = open_state()
    submit(state, "a")
    grants = lease(state, 2, now_s=44.0)
    [first, *_] = lines(state)
    assert "sample a/0 is leased by gen-1 for 6 s, no token yet, lease ends in 24 s unless renewed" in first
    for grant in grants:
        assert put(state, grant, [7, 8, 9], now_s=46.0) == []
    [first, *_] = lines(state)
    assert "sample a/0 is decoded by gen-1 for 6 s, 3 tokens so far" in first


def test_a_sample_without_tokens_on_a_living_generator_stands_out() -> None:
    state = open_state()
    submit(state, "a")
    lease(state, 2, now_s=30.0)
    assert "sample a/0 is leased by gen-1, silent for 20 s while gen-1 lives" in lines(state)[0]


def test_a_sample_that_still_grows_after_long_is_not_silent() -> None:
    state = open_state()
    submit(state, "a")
    for grant in lease(state, 2, now_s=20.0):
        assert put(state, grant, [7], now_s=45.0) == []
    assert "sample a/0 is decoded by gen-1 for 30 s, 1 token so far" in lines(state)[0]


def test_a_sample_that_its_token_shard_must_count_is_named() -> None:
    state = open_state(group_size=1, policy=broker_pb2.RunPolicy(token_shards=2))
    submit(state, "a")
    (grant,) = lease(state, 1)
    assert leasing.expire(state, NOW_S) == 1
    assert lines(state)[0] == (
        f"trainer > token shard {grant.token_shard}: 2 of 2 groups are missing; sample a/0 lost its lease; its "
        "shard must say how many of its tokens are stored before it is queued"
    )


def test_finished_samples_without_a_reward_worker() -> None:
    state = open_state()
    submit(state, "a", "b")
    finish(state, lease(state, 4, now_s=2.0))
    text = "2 of 2 groups are missing; no reward worker is connected; 4 finished samples wait for 47 s"
    assert lines(state, present(workers=()))[0] == f"trainer > reward workers: {text}"
    assert "4 finished samples wait for a free reward worker" in lines(state)[0]


def test_a_reward_worker_that_is_gone_is_named() -> None:
    state = open_state()
    submit(state, "a")
    finish(state, lease(state, 2, now_s=2.0))
    lease_scoring(state, 2, now_s=4.0)
    assert lines(state, present(workers=("worker-2",)), 44.0)[0] == (
        "trainer > reward worker worker-1: 2 of 2 groups are missing; sample a/0 is scored by worker-1, which is gone, "
        "lease ends in 20 s, then another scores it"
    )
    assert (
        "sample a/0 is scored by worker-1, finished 41 s ago, lease ends in 20 s unless renewed"
        in lines(state, now_s=44.0)[0]
    )


def test_a_reward_model_that_is_away_is_named() -> None:
    state = open_state()
    submit(state, "a")
    finish(state, lease(state, 2, now_s=2.0))
    lease_scoring(state, 2, now_s=4.0)
    view = WorkerView(seen_s=NOW_S, holding_reason="reward model judge is unreachable: refused", holding_since_s=8.0)
    who = replace(present(), holding={"worker-1": view})
    assert lines(state, who)[0] == (
        "trainer > reward worker worker-1: 2 of 2 groups are missing; "
        "worker-1 holds 2 finished samples: reward model judge is unreachable: refused"
    )
    assert waits(state, who, NOW_S)[0].since_time == timestamp(8.0)


def test_a_generator_with_old_weights_holds_the_queue_back() -> None:
    state = open_state(max_staleness=1)
    for version in range(3):
        make_ready(state, f"a{version}", f"b{version}", version=version)
        acknowledge(state, deliver(state), version + 1)
    submit(state, *"xyz")
    assert lines(state, present(view(version=1))) == [
        "trainer > generator gen-1: 2 of 2 groups are missing; admission holds 3 groups back: "
        "generator gen-1 is at version 1, trainer at 3"
    ]
    assert "wait for a free slot" in lines(state, present(view(version=1), view("gen-2", version=3)))[0]


def test_generators_that_wait_for_the_trainer_share_a_line() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    submit(state, "c")
    assert deliver(state) == ["a", "b"]
    assert lines(state, present(view(), view("gen-2"))) == [
        "the run > trainer: all 2 groups of this step are delivered: it computes, or must acknowledge the step",
        "generator gen-1 and 1 more > trainer: admission: the trainer must finish a step before more is started",
    ]


def test_ready_groups_without_a_consumer() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    assert "the run > trainer: 2 groups are ready, but its stream takes none" in lines(state)
    assert deliver(state, 1) == ["a"]
    assert acknowledge(state, ["a"], 1).num_samples == 2


def test_too_few_groups_in_flight() -> None:
    state = open_state(groups_per_step=3)
    make_ready(state, "a")
    assert lines(state)[0] == (
        "trainer > submitter of prompts: 2 of 3 groups are missing and none is on its way: submit prompts"
    )


def test_a_ready_group_waits_for_one_that_is_due() -> None:
    state = open_state(groups_per_step=1, max_staleness=1)
    submit(state, "old")
    [slow, other] = lease(state, 2, 0, now_s=40.0)
    finish(state, [other])
    make_ready(state, "new", version=0)
    acknowledge(state, deliver(state), 1)
    make_ready(state, "newer", version=1)
    assert deliver(state) == []
    assert lines(state, present(view(version=1)))[0].startswith(
        "trainer > generator gen-1: 1 group must come first or be too stale; sample old/0 is leased by gen-1"
    )
    finish(state, [slow])
    for grant in lease_scoring(state, 2):
        score(state, grant)
    assert deliver(state) == ["old"]


def test_evaluation_waits_are_distinguished() -> None:
    state = open_state()
    submission.submit(state, [evaluation("e")], retired=(), now_s=1.0)
    assert lines(state)[1] == "evaluation > generators: 1 group waits for a free slot of a generator"
    [grant] = lease(state, 1, now_s=45.0)
    assert lines(state)[1].startswith("evaluation > generator gen-1: sample e/0 is leased by gen-1 for 5 s")
    finish(state, [grant])
    assert "evaluation > reward workers: 1 finished sample waits for a free reward worker" in lines(state)
    [scoring_grant] = lease_scoring(state, 1)
    score(state, scoring_grant)
    assert "evaluation > trainer: 1 group is ready: the trainer's stream takes none" in lines(state)


def test_the_worst_comes_first_and_each_cause_once() -> None:
    state = open_state(groups_per_step=4, max_staleness=1)
    submit(state, "a", "b", "c")
    grants = lease(state, 4, now_s=20.0)
    finish(state, grants[:2])
    found = lines(state, Present(generators=[view(heard_s=20.0)], worker_ids=()), 45.0)
    assert [line.partition(";")[0] for line in found] == [
        "trainer > generator gen-1: 4 of 4 groups are missing",
        "groups > generators: no generator is connected",
        "samples > reward workers: no reward worker is connected",
    ]


def test_a_waiting_trainer_hears_the_same_and_how_many() -> None:
    state = open_state()
    submit(state, "a", "b", "c")
    finish(state, lease(state, 3, now_s=2.0))
    told = waiting(state, present(), NOW_S)
    assert (told.num_queued_groups, told.num_leased_groups, told.num_scoring_groups) == (1, 0, 2)
    assert f"trainer > reward workers: {told.reason}" == lines(state)[0]
    assert told.reason.startswith("2 of 2 groups are missing; 3 finished samples")


def test_of_very_many_leases_some_are_looked_at_and_later_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "MAX_LOOKED", 2)
    state = open_state(group_size=1, groups_per_step=4)
    submit(state, "a", "b", "c")
    submission.submit(state, [evaluation("e")], retired=(), now_s=1.0)
    for number in range(4):
        assert len(lease(state, 1, generator_id=f"g{number}", now_s=44.0)) == 1
    found = [lines(state, present(view("g9")), NOW_S + second) for second in range(3)]
    assert [text[0].split(" is leased")[0].split()[-1] for text in found] == ["b/0", "c/0", "a/0"]
    # An evaluation's is found, too, wherever it is.
    assert all("sample e/0 is leased by g0" in text[1] for text in found)


def test_only_the_longest_silent_generators_of_many_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "MAX_SILENT", 1)
    state = open_state(group_size=1)
    submit(state, "a", "b")
    for name in ("g0", "g1"):
        assert len(lease(state, 1, generator_id=name, now_s=20.0)) == 1
    who = present(view("g0", heard_s=24.0), view("g1", heard_s=22.0))
    [line] = [line for line in lines(state, who, 40.0) if "silent" in line]
    assert "leased by g1, silent for 18 s" in line
