"""What a round deals to whom, and that nothing that was left to another generator waits for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import DispatchPolicy
from services.broker.dispatch.streamrl import StreamRl
from services.broker.fleet import deal_round, dealer
from services.broker.fleet.deal_round import Deal, Seat
from services.broker.fleet.dealer import Dealer
from services.broker.fleet.snapshot import REFRESH_S, Fleet, GeneratorStatus
from services.broker.operations import submission
from services.broker.operations.leasing import Grant
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import prompt
from tests.unit.broker.builders import (
    acknowledge,
    deliver,
    facts,
    finish,
    lease_scoring,
    open_state,
    score,
    submit,
    suffix,
)

FAST, SLOW = LatencyModel(base_s=0.01, max_samples=8), LatencyModel(base_s=0.0105, max_samples=8)
"""Near enough that neither waits for the other, far enough that the fast one is first."""
STARTING = broker_pb2.RunPolicy(dispatch="least_loaded")


def _status(name: str, model: LatencyModel = SLOW, *, num_free: int = 8, version: int = 0) -> GeneratorStatus:
    return GeneratorStatus(
        generator_id=name,
        model=model,
        num_free=num_free,
        max_context_tokens=128,
        is_speed_known=True,
        policy_version=version,
    )


@dataclass(slots=True)
class Broker:
    """One broker process of the run: its attached generators, and what it knows of all."""

    policy: DispatchPolicy = field(default_factory=LongestFirst)
    seats: dict[str, Seat] = field(default_factory=dict)
    dealer: Dealer = field(default_factory=lambda: Dealer(Fleet()))

    def attach(self, name: str, *, num_free: int = 8, version: int = 0) -> None:
        self.seats[name] = Seat(facts(version, generator_id=name), num_free=num_free)

    def deal(self, state: RunState, statuses: Mapping[str, GeneratorStatus], now_s: float) -> Deal:
        """A round; its leases are handed out."""
        dealt = self.dealer.deal(
            state, self.policy, self.seats, lambda: statuses, now_s, make_suffix=suffix, longest_context_tokens=128
        )
        assert dealt is not None
        state.settle()
        for name, grants in dealt.grants.items():
            self.seats[name].num_free -= len(grants)
        return dealt


def _started(dealt: Deal) -> set[str]:
    return {grant.sample[0] for grants in dealt.grants.values() for grant in grants}


def test_one_round_leases_to_every_generator_attached_here() -> None:
    state = open_state(policy=broker_pb2.RunPolicy(dispatch="lpt"), groups_per_step=4, group_size=4)
    submit(state, "a", "b", "c", "d")
    broker = Broker()
    names = [f"gen-{number}" for number in range(4)]
    for name in names:
        broker.attach(name)
    dealt = broker.deal(state, {name: _status(name) for name in names}, 1.0)
    assert {name: len(grants) for name, grants in dealt.grants.items()} == dict.fromkeys(names, 4)
    assert not state.queue
    assert not dealt.is_cut


def test_a_large_round_is_cut_and_the_next_one_goes_on() -> None:
    state = open_state(policy=broker_pb2.RunPolicy(dispatch="lpt"), groups_per_step=64, group_size=4)
    submit(state, *(f"g{number}" for number in range(64)))
    broker = Broker()
    broker.attach("gen-1", num_free=256)
    statuses = {"gen-1": _status("gen-1", LatencyModel(max_samples=256), num_free=256)}
    num_rounds, is_cut = 0, True
    while is_cut:
        is_cut = broker.deal(state, statuses, 1.0).is_cut
        num_rounds += 1
    assert num_rounds > 1
    assert not state.queue


def test_a_start_does_not_take_the_room_of_an_older_one_that_is_left_to_another_broker() -> None:
    """Were the younger group started, admission would refuse the older one, here and there."""
    state = open_state(policy=STARTING, groups_per_step=1, group_size=1, max_staleness=0)
    submit(state, "older", "younger")
    broker = Broker(policy=make_policy("least_loaded"))
    broker.attach("here")
    statuses = {"here": _status("here"), "elsewhere": _status("elsewhere", FAST)}
    assert _started(broker.deal(state, statuses, 1.0)) == set()
    # The other one never asks: it is not counted on for ever, and the older group is still the next to start.
    assert _started(broker.deal(state, statuses, 1.0 + dealer.MAX_WAIT_S)) == {"older"}


def test_younger_groups_start_while_admission_has_room_for_the_older_one_too() -> None:
    state = open_state(policy=STARTING, groups_per_step=2, group_size=1, max_staleness=0)
    submit(state, "older", "younger", "youngest")
    broker = Broker(policy=make_policy("least_loaded"))
    broker.attach("here")
    statuses = {"here": _status("here"), "elsewhere": _status("elsewhere", FAST, num_free=1)}
    assert _started(broker.deal(state, statuses, 1.0)) == {"younger"}
    # The other broker deals to its own generator: what was left to it can still be started.
    other = Broker(policy=make_policy("least_loaded"))
    other.attach("elsewhere", num_free=1)
    statuses = {"here": _status("here", num_free=7), "elsewhere": _status("elsewhere", FAST, num_free=1)}
    assert _started(other.deal(state, statuses, 1.0)) == {"older"}


def test_a_generator_that_left_gets_nothing_and_is_not_counted_on() -> None:
    state = open_state(policy=STARTING, groups_per_step=2, group_size=1, max_staleness=0)
    broker = Broker(policy=make_policy("least_loaded"))
    broker.attach("here")
    broker.attach("leaves")
    statuses = {"here": _status("here"), "leaves": _status("leaves", FAST)}
    broker.deal(state, statuses, 1.0)
    submit(state, "a", "b")
    del broker.seats["leaves"]
    assert set(broker.deal(state, statuses, 1.0).grants) == {"here"}


def test_weights_of_an_abandoned_history_get_nothing() -> None:
    state = open_state(policy=STARTING, groups_per_step=2, group_size=1)
    submit(state, "a")
    broker = Broker(policy=make_policy("least_loaded"))
    broker.attach("here")
    broker.seats["here"].facts = facts(generator_id="here", instance_id="another")
    assert broker.deal(state, {"here": _status("here")}, 1.0).grants == {}


@pytest.mark.parametrize("seed", range(40))
def test_every_submitted_group_ends(seed: int) -> None:
    """Two brokers deal one run; generators stop, come back, and lag behind with their weights."""
    _World(seed).play()


class _World:
    """A run whose brokers and generators do what a seed says."""

    def __init__(self, seed: int) -> None:
        self._random = rng = random.Random(seed)
        self._batch = rng.choice((1, 2, 3))
        self._state = open_state(
            policy=broker_pb2.RunPolicy(dispatch=rng.choice(("least_loaded", "lpt", "streamrl"))),
            groups_per_step=self._batch,
            group_size=rng.choice((1, 2, 4)),
            max_staleness=rng.choice((0, 0, 1)),
            max_queued_groups=64,
        )
        self._num_groups = 4 * self._batch
        submit(self._state, *(f"g{number}" for number in range(self._num_groups)))
        self._brokers = [Broker(policy=make_policy(self._state.policy.dispatch)) for _ in range(2)]
        self._versions: dict[str, int] = {}
        self._models: dict[str, LatencyModel] = {}
        for number in range(4):
            name = f"gen-{number}"
            self._versions[name], self._models[name] = 0, rng.choice((FAST, SLOW, FAST.scaled(3.0)))
            self._brokers[number % 2].attach(name, num_free=rng.choice((1, 2, 8)))
        self._held: list[tuple[str, int, Grant]] = []
        self._delivered: list[str] = []

    def play(self) -> None:
        for tick in range(600):
            self._tick(0.3 * tick)
            if self._state.run.policy_version * self._batch == self._num_groups:
                return
        raise AssertionError(f"at version {self._state.run.policy_version}, queued: {list(self._state.queue)}")

    def _tick(self, now_s: float) -> None:
        # Each broker hangs half of the time: its generators then look idle to the other one, and take nothing.
        for broker in self._brokers:
            if self._random.random() < 0.5:
                self._deal(broker, now_s)
        self._finish_some()
        for grant in lease_scoring(self._state, 100):
            score(self._state, grant)
        self._delivered += deliver(self._state)
        if len(self._delivered) == self._batch:
            acknowledge(self._state, self._delivered, self._state.run.policy_version + 1)
            self._delivered = []
        self._state.settle()

    def _deal(self, broker: Broker, now_s: float) -> None:
        for name, seat in broker.seats.items():
            if self._random.random() < 0.7:
                self._versions[name] = self._state.run.policy_version
            seat.facts = facts(self._versions[name], generator_id=name)
        statuses = {
            name: _status(name, self._models[name], num_free=seat.num_free, version=self._versions[name])
            for one in self._brokers
            for name, seat in one.seats.items()
        }
        for name, grants in broker.deal(self._state, statuses, now_s).grants.items():
            self._held += [(name, self._versions[name], grant) for grant in grants]

    def _finish_some(self) -> None:
        kept = []
        for name, version, grant in self._held:
            if self._random.random() < 0.5:
                kept.append((name, version, grant))
                continue
            finish(self._state, [grant], version, holder=name)
            for broker in self._brokers:
                if name in broker.seats:
                    broker.seats[name].num_free += 1
        self._held = kept


def test_an_evaluation_is_dealt_though_admission_refuses_every_further_start() -> None:
    """Evaluations go first, whatever admission says of starts."""
    state = open_state(policy=STARTING, groups_per_step=1, group_size=1, max_staleness=0)
    submit(state, "train", "train-2")
    submit(state, "evaluate", purpose=types_pb2.PURPOSE_EVALUATE)
    broker = Broker(policy=make_policy("least_loaded"))
    broker.attach("here")
    assert _started(broker.deal(state, {"here": _status("here")}, 1.0)) == {"train", "evaluate"}


class _Counted(Mapping[str, GeneratorStatus]):
    """Statuses that note how many were read."""

    def __init__(self, names: list[str]) -> None:
        self._names, self.num_read = names, 0

    def __getitem__(self, name: str) -> GeneratorStatus:
        self.num_read += 1
        return _status(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def test_a_large_fleet_is_read_a_slice_in_each_round_and_all_of_it_gets_work() -> None:
    names = [f"gen-{number}" for number in range(2 * dealer.SLICE + 1)]
    state = open_state(
        policy=broker_pb2.RunPolicy(dispatch="lpt"), groups_per_step=len(names), group_size=1, max_queued_groups=1000
    )
    submit(state, *(f"g{number}" for number in range(len(names))))
    broker = Broker()
    for name in names:
        broker.attach(name, num_free=1)
    statuses = _Counted(names)
    taking: set[str] = set()
    num_read = [0]
    while state.queue:
        taking |= broker.deal(state, statuses, 1.0).grants.keys()
        num_read.append(statuses.num_read)
    assert max(after - before for before, after in itertools.pairwise(num_read)) == dealer.SLICE
    assert taking == set(names)


def test_a_generator_that_left_a_large_fleet_is_left_nothing() -> None:
    state = open_state(policy=STARTING, groups_per_step=400, group_size=1, max_staleness=0, max_queued_groups=1000)
    submit(state, "g")
    broker = Broker(policy=make_policy("least_loaded"))
    broker.attach("here")
    others = [f"gen-{number}" for number in range(dealer.SLICE)]
    statuses = {"here": _status("here"), **{name: _status(name, FAST) for name in others}}
    assert _started(broker.deal(state, statuses, 1.0)) == set()
    later_s = 1.0 + max(REFRESH_S, dealer.MEMBER_S * len(statuses))
    assert _started(broker.deal(state, {"here": _status("here")}, later_s)) == {"g"}


def test_streamrl_leaves_no_generator_idle_beside_a_queue_of_the_other_part() -> None:
    """The front of the queue is all of one part, whose generators are full; the other part comes too late in it."""
    state = open_state(
        policy=broker_pb2.RunPolicy(dispatch="streamrl"), groups_per_step=5, group_size=1, max_queued_groups=1000
    )
    prompts = [prompt(f"g{number}", group_size=1) for number in range(10)]
    # By steps of five: one of the long tail in each.
    forecasts = {each.group_id: 120.0 if number % 5 == 0 else 10.0 for number, each in enumerate(prompts)}
    assert submission.submit(state, prompts, retired=(), now_s=1.0, forecasts=forecasts) == []
    policy = StreamRl()
    broker = Broker(policy=policy)
    broker.attach("a-long", num_free=1)
    broker.attach("b-regular", num_free=0)
    statuses = {name: _status(name, num_free=seat.num_free) for name, seat in broker.seats.items()}
    dealt = broker.deal(state, statuses, 1.0)
    assert policy.long_tail_ids == {"a-long"}
    assert _started(dealt) == {"g0"}
    # It is free again, and the look into the queue ends before the second of the long tail.
    broker.seats["a-long"].num_free = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deal_round, "MAX_GROUPS_SCANNED", 3)
        dealt = broker.deal(state, statuses, 1.01)
    assert len(_started(dealt)) == 1
    assert not _started(dealt) & {"g0", "g5"}
