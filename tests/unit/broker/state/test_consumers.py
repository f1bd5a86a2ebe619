"""Who gets which groups: streams that replace one another, other consumers, evaluation, puts beside leased groups."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidFieldError, LeaseLostError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import delivery
from services.broker.operations.delivery import MAX_CONSUMERS, Consumer
from tests.helpers.brokers.trajectories import groups
from tests.unit.broker.builders import (
    CONSUMER,
    acknowledge,
    deliver,
    finish,
    lease,
    lease_scoring,
    make_ready,
    open_state,
    score,
    submit,
)
from tests.unit.broker.state.test_batches import put

TRAIN, EVALUATE = types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVALUATE
TOKENS_OF_A_GROUP = 2 * (3 + 2)
"""Of the builders' groups: two samples, each a prompt of three tokens and a completion of two."""


def _consumer(name: str, purpose: types_pb2.Purpose.ValueType = TRAIN, *, stream_id: str = "s") -> Consumer:
    return Consumer(consumer_id=name, purpose=purpose, stream_id=stream_id)


def test_a_run_has_a_limit_of_consumers_and_those_it_has_may_come_back() -> None:
    state = open_state()
    for number in range(MAX_CONSUMERS - len(state.run.streams)):
        delivery.attach(state, _consumer(f"more-{number}"), held=())
    with pytest.raises(InvalidFieldError, match=f"{MAX_CONSUMERS} consumers"):
        delivery.attach(state, _consumer("one-too-many"), held=())
    assert delivery.attach(state, _consumer("more-0"), held=()).number == 2
    assert len(state.run.streams) == MAX_CONSUMERS


def test_streams_are_numbered_whatever_they_are_called() -> None:
    state = open_state()
    numbers = [
        delivery.attach(state, _consumer("rank-1", stream_id=name), held=()).number for name in ("a.b", "c.", "")
    ]
    assert numbers == [1, 2, 3]


def test_of_two_streams_with_one_number_the_one_that_the_store_knows_goes_on() -> None:
    """The store lost the first one's beginning, and the second got its number."""
    state = open_state()
    state.run.streams.clear()
    other = delivery.attach(state, _consumer("rank-0", stream_id="other"), held=())
    assert other.number == CONSUMER.number
    delivery.check_attached(state, other)
    with pytest.raises(LeaseLostError):
        delivery.check_attached(state, CONSUMER)


def test_a_consumer_that_comes_back_takes_nothing_from_another() -> None:
    state = open_state()
    make_ready(state, "a", "b")
    deliver(state, 1)
    delivery.attach(state, _consumer("rank-1"), held=())
    assert (state.index.delivered[TRAIN], state.index.first_ready(TRAIN, 9)) == ({"a"}, ["b"])
    assert state.groups["a"].consumer_id == "rank-0"


def test_all_that_is_out_can_be_handed_back_for_another_trainer() -> None:
    state = open_state(groups_per_step=4)
    make_ready(state, "a", "b")
    put(state, *groups("p", "q"))
    out = deliver(state)
    assert len(out) == 3
    delivery.hand_all_back(state)
    assert state.index.delivered[TRAIN] == set()
    assert {group.consumer_id for group in state.groups.values()} == {""}
    assert deliver(state) == out


def test_evaluation_groups_go_in_order_of_submission() -> None:
    state = open_state()
    names = [f"e{number}" for number in (5, 3, 4, 1, 2)]
    submit(state, *names, purpose=EVALUATE, group_size=1)
    finish(state, lease(state, 9))
    for grant in lease_scoring(state, 9):
        score(state, grant)
    consumer = delivery.attach(state, _consumer("rank-0", EVALUATE), held=())
    delivered = [delivery.deliver(state, consumer, max_groups=3, target_tokens=0) for _ in range(2)]
    assert delivered == [names[:3], names[3:]]


@pytest.mark.parametrize(("target_tokens", "num_groups"), [(TOKENS_OF_A_GROUP, 1), (TOKENS_OF_A_GROUP + 1, 2)])
def test_a_microbatch_aims_at_tokens_of_prompts_and_completions(target_tokens: int, num_groups: int) -> None:
    state = open_state(groups_per_step=4)
    make_ready(state, "a", "b", "c")
    chosen = delivery.deliver(state, CONSUMER, max_groups=9, target_tokens=target_tokens)
    assert chosen == ["a", "b", "c"][:num_groups]


def test_samples_that_were_dropped_do_not_count_as_tokens_of_a_microbatch() -> None:
    state = open_state(groups_per_step=4, group_size=3)
    submit(state, "a", "b")
    finish(state, lease(state, 9))
    for grant in lease_scoring(state, 9):
        is_lost = grant.sample == ("a", 0)
        score(state, grant, types_pb2.SCORE_STATUS_FAILED if is_lost else types_pb2.SCORE_STATUS_OK)
    chosen = delivery.deliver(state, CONSUMER, max_groups=9, target_tokens=TOKENS_OF_A_GROUP + 1)
    assert chosen == ["a", "b"]


def test_due_puts_take_no_place_from_a_due_group_that_is_not_ready() -> None:
    state = open_state(groups_per_step=2, max_staleness=1)
    submit(state, "slow")
    slow = lease(state, 2)
    make_ready(state, "x", "y")
    put(state, *groups("due"))
    acknowledge(state, deliver(state), 1)
    make_ready(state, "young", version=1)
    [name] = deliver(state)
    assert list(state.groups[name].put.group_ids) == ["due"]
    assert deliver(state) == []
    finish(state, slow)
    for grant in lease_scoring(state, 9):
        score(state, grant)
    assert deliver(state) == ["slow"]


def test_a_receipt_counts_samples_of_leased_groups_and_of_puts() -> None:
    state = open_state(groups_per_step=4, max_staleness=1, policy=broker_pb2.RunPolicy())
    make_ready(state, "a")
    put(state, *groups("p", "q"))
    assert len(deliver(state)) == 2
    receipt = acknowledge(state, ["q", "a", "p"], 1)
    assert (receipt.num_samples, receipt.max_staleness_seen, receipt.policy_version) == (6, 0, 1)
