"""One trainer at a time, and one run behind each id."""

from __future__ import annotations

import pytest

from penstock.errors import (
    FencedError,
    InvalidFieldError,
    OtherInstanceError,
    RunClosedError,
    VersionConflictError,
)
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import delivery, ownership
from services.broker.operations.delivery import Consumer
from services.broker.operations.lifecycle import create_run, reopen_run
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import limits
from tests.unit.broker.builders import make_ready


def _owner(owner_id: str, epoch: int = 0, instance_id: str = "first") -> broker_pb2.RunOwner:
    return broker_pb2.RunOwner(instance_id=instance_id, owner_id=owner_id, epoch=epoch)


def _request(
    owner: broker_pb2.RunOwner,
    version: int = 0,
    *steps: broker_pb2.StepRecord,
    takes_over: bool = True,
    resumes: broker_pb2.RunOwner | None = None,
) -> broker_pb2.OpenRunRequest:
    return broker_pb2.OpenRunRequest(
        run_id="run-1",
        limits=limits(max_staleness=1),
        policy_version=version,
        owner=owner,
        takes_over=takes_over,
        steps=steps,
        resumes=resumes,
    )


def _opened(owner_id: str = "a") -> RunState:
    state = RunState()
    assert create_run(state, _request(_owner(owner_id)), 0.0).epoch == 1
    return state


def _take_over(state: RunState, owner_id: str, version: int = 0, *, epoch: int = 0) -> int:
    return reopen_run(state, _request(_owner(owner_id, epoch), version), 60.0).epoch


def _attach(state: RunState, stream_id: str) -> Consumer:
    """A stream of the trainer's one consumer, whoever the trainer is."""
    consumer = Consumer(consumer_id="trainer-0", purpose=types_pb2.PURPOSE_TRAIN, stream_id=stream_id)
    return delivery.attach(state, consumer, held=())


def _acknowledge(state: RunState, owner: broker_pb2.RunOwner, groups: list[str], version: int) -> None:
    ownership.admit(state, owner, 61.0)
    delivery.acknowledge(state, "trainer-0", groups, version, 61.0)


def test_a_trainer_that_wakes_up_after_another_took_over_cannot_acknowledge_or_rewind() -> None:
    state = _opened("a")
    make_ready(state, "t0", "t1", "t2", "t3")
    groups_of_a = delivery.deliver(state, _attach(state, "a"), max_groups=2, target_tokens=0)
    assert _take_over(state, "b") == 2
    groups_of_b = delivery.deliver(state, _attach(state, "b"), max_groups=2, target_tokens=0)
    assert groups_of_b == groups_of_a
    with pytest.raises(FencedError, match=r"trainer 'b' took run 'run-1' over at 1970-01-01 00:01:00 UTC \(epoch 2"):
        _acknowledge(state, _owner("a", 1), groups_of_a, 1)
    _acknowledge(state, _owner("b", 2), groups_of_b, 1)
    before = audit(state)
    with pytest.raises(FencedError):
        reopen_run(state, _request(_owner("a", 1), 0, takes_over=False), 70.0)
    step = broker_pb2.StepRecord(policy_version=1, group_ids=groups_of_a)
    with pytest.raises(FencedError):
        reopen_run(state, _request(_owner("a", 1), 1, step, takes_over=False), 70.0)
    assert (state.run.policy_version, state.run.history, audit(state)) == (1, 0, before)


def test_a_call_that_only_asks_neither_rewinds_nor_opens_again() -> None:
    state = _opened("a")
    make_ready(state, "t0", "t1")
    groups = delivery.deliver(state, _attach(state, "a"), max_groups=2, target_tokens=0)
    _acknowledge(state, _owner("a", 1), groups, 1)
    with pytest.raises(VersionConflictError, match="only a call that takes it over goes back"):
        reopen_run(state, _request(_owner("a", 1), 0, takes_over=False), 7.0)
    assert (state.run.policy_version, state.run.history) == (1, 0)
    state.run.is_closed = True
    with pytest.raises(RunClosedError):
        reopen_run(state, _request(_owner("a", 1), 1, takes_over=False), 7.0)
    assert state.run.is_closed


def test_what_the_former_owner_held_is_ready_for_the_new_one_whatever_it_calls_itself() -> None:
    state = _opened("a")
    make_ready(state, "t0", "t1", "t2", "t3")
    assert delivery.deliver(state, _attach(state, "a"), max_groups=2, target_tokens=0)
    _take_over(state, "b")
    assert not state.index.delivered[types_pb2.PURPOSE_TRAIN]
    consumer = Consumer(consumer_id="another-name", purpose=types_pb2.PURPOSE_TRAIN, stream_id="b")
    got = delivery.deliver(state, delivery.attach(state, consumer, held=()), max_groups=2, target_tokens=0)
    assert got == ["t0", "t1"]


def test_a_take_over_whose_answer_was_lost_is_repeated_with_the_same_epoch() -> None:
    state = _opened("a")
    assert [_take_over(state, "b"), _take_over(state, "b"), _take_over(state, "b", epoch=2)] == [2, 2, 2]
    assert _take_over(state, "a", epoch=1) == 3


def _resume(state: RunState, owner_id: str, *, known: broker_pb2.RunOwner) -> int:
    return reopen_run(state, _request(_owner(owner_id, known.epoch), resumes=known), 60.0).epoch


def test_an_automatic_resume_does_not_take_the_run_from_a_successor() -> None:
    state = _opened("a")
    _take_over(state, "b")
    state.run.is_closed = True
    before = audit(state)
    for known in (_owner("a", 1), _owner("", 0), _owner("", 1)):
        with pytest.raises(FencedError, match=r"'b' took run 'run-1' over at .* \(epoch 2, this trainer last knew"):
            _resume(state, "a-again", known=known)
    assert (state.run.owner.owner_id, state.run.owner.epoch, audit(state)) == ("b", 2, before)
    assert state.run.is_closed
    # Somebody asked for it.
    assert _take_over(state, "a-again", epoch=1) == 3


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(_owner("a", 1), id="the last owner"),
        pytest.param(_owner("a"), id="whose take-over's answer was lost with its process"),
        pytest.param(_owner("", 1), id="one that ended before it took the run over"),
        pytest.param(_owner("a", 5), id="of a store that lost its end"),
    ],
)
def test_a_resume_takes_the_run_over_if_no_other_trainer_has(known: broker_pb2.RunOwner) -> None:
    state = _opened("a")
    epoch = _resume(state, "a-again", known=known)
    assert epoch == max(1, known.epoch) + 1
    # Its answer was lost: it asks again.
    assert _resume(state, "a-again", known=known) == epoch


@pytest.mark.parametrize("known", [_owner("a" * 129), _owner("a", 2**60)])
def test_a_former_owner_that_is_not_well_formed_is_refused(known: broker_pb2.RunOwner) -> None:
    for open_run in (create_run, reopen_run):
        state = RunState() if open_run is create_run else _opened()
        with pytest.raises(InvalidFieldError, match=r"resumes\."):
            open_run(state, _request(_owner("b"), resumes=known), 0.0)


def test_an_epoch_that_the_store_lost_is_taken_from_its_owner() -> None:
    state = _opened("a")
    # The store forgot that "b" took over twice.
    reopen_run(state, _request(_owner("b", 3), takes_over=False), 9.0)
    assert (state.run.owner.owner_id, state.run.owner.epoch) == ("b", 3)
    with pytest.raises(FencedError):
        ownership.admit(state, _owner("a", 1), 9.0)
    # Whoever begins from a newer checkpoint than the store knows of counts on from there.
    assert _take_over(state, "c", epoch=7) == 8


def test_equal_epochs_of_two_trainers_never_both_pass() -> None:
    state = _opened("a")
    with pytest.raises(FencedError):
        ownership.admit(state, _owner("b", 1), 9.0)
    ownership.admit(state, _owner("a", 1), 9.0)


def test_a_run_that_was_never_taken_over_by_name_is_open_to_all_without_one() -> None:
    state = RunState()
    nobody = broker_pb2.RunOwner()
    assert create_run(state, _request(nobody), 0.0).epoch == 0
    reopen_run(state, _request(nobody, takes_over=False), 1.0)
    reopen_run(state, _request(_owner("a", instance_id="")), 1.0)
    with pytest.raises(FencedError):
        reopen_run(state, _request(nobody, takes_over=False), 1.0)
    with pytest.raises(
        InvalidFieldError, match=r"owner.owner_id: must be set to take over run 'run-1', which 'a' owns"
    ):
        reopen_run(state, _request(nobody), 1.0)


def test_another_run_under_a_used_id_is_refused_with_three_ways_on() -> None:
    state = _opened("a")
    make_ready(state, "t0", "t1")
    before = audit(state)
    with pytest.raises(OtherInstanceError) as refused:
        reopen_run(state, _request(_owner("b", instance_id="second")), 9.0)
    for words in ("'run-1'", "'first'", "--resume DIR", "another run id", "penstock runs delete run-1"):
        assert words in str(refused.value)
    with pytest.raises(OtherInstanceError):
        ownership.admit(state, _owner("a", 9, instance_id="second"), 9.0)
    assert (state.run.owner.owner_id, state.run.owner.epoch, audit(state)) == ("a", 1, before)


@pytest.mark.parametrize(
    ("owner", "field"),
    [
        (_owner("a" * 129), "owner.owner_id"),
        (_owner("a\n"), "owner.owner_id"),
        (_owner("a", instance_id="i" * 129), "owner.instance_id"),
        (_owner("a", 2**60), "owner.epoch"),
        (_owner("", 1), "owner.owner_id"),
    ],
)
def test_an_owner_that_is_not_well_formed_is_refused(owner: broker_pb2.RunOwner, field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        create_run(RunState(), _request(owner), 0.0)
    with pytest.raises(InvalidFieldError, match=field):
        ownership.admit(_opened(), owner, 0.0)
