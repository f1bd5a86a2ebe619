"""What generators get of one plan, against what each would get of a placement made for it alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from penstock.v1 import broker_pb2, types_pb2
from services.broker import generation
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.plan import Plan
from services.broker.dispatch.registry import make_policy
from services.broker.dispatch.types import DispatchPolicy
from services.broker.fleet import REFRESH_S, Fleet, GeneratorStatus
from services.broker.generation import Choice, Grants
from services.broker.planner import MAX_PLACED, Planner
from services.broker.run_state import RunState
from services.broker.store import SampleId
from tests.unit.broker.builders import facts, open_state, submit, suffix

NUM_SLOTS = 16
MODEL = LatencyModel(base_s=0.01, per_sample_s=0.0002, max_samples=NUM_SLOTS)
Statuses = dict[str, GeneratorStatus]


def statuses_of(state: RunState, models: Mapping[str, LatencyModel]) -> Statuses:
    return {
        name: GeneratorStatus(
            generator_id=name,
            model=model,
            num_free=model.max_samples - len(state.generation_leases.get(name, ())),
            max_context_tokens=128,
            is_speed_known=True,
        )
        for name, model in models.items()
    }


def lease(state: RunState, name: str, choice: Choice, *, version: int = 0, most: int = NUM_SLOTS) -> Grants:
    asking = facts(version, generator_id=name)
    found = generation.lease(state, asking, max_leases=most, now_s=2.0, make_suffix=suffix, choice=choice)
    state.settle()
    return found


class Asks:
    """Generators that ask for work, answered from plans."""

    def __init__(self, state: RunState, models: Mapping[str, LatencyModel], policy: str = "lpt") -> None:
        self.state, self.models, self.policy = state, models, make_policy(policy)
        self.planner = Planner(Fleet())
        self.plans: list[Plan] = []

    def ask(self, name: str, *, now_s: float = 2.0, may_start: bool = True, version: int = 0) -> Grants:
        statuses = statuses_of(self.state, self.models)
        asking = statuses[name]
        if not may_start:
            asking = GeneratorStatus(
                generator_id=name,
                model=asking.model,
                num_free=asking.num_free,
                max_context_tokens=128,
                is_speed_known=True,
                may_start=False,
            )
        choice = self.planner.choose(self.state, self.policy, asking, lambda: statuses, now_s)
        assert self.planner.planned is not None
        if self.planner.planned.plan not in self.plans:
            self.plans.append(self.planner.planned.plan)
        return lease(self.state, name, choice, version=version, most=asking.num_free)

    @property
    def num_tried(self) -> int:
        """Generators looked at so far."""
        return sum(plan.num_tried for plan in self.plans)

    @property
    def num_placed(self) -> int:
        """Samples placed so far, some by several plans."""
        return sum(plan.num_placed for plan in self.plans)


def alone(state: RunState, policy: DispatchPolicy, models: Mapping[str, LatencyModel], name: str) -> Grants:
    """What a generator got before there were plans: the whole queue was placed anew for each that asked."""
    statuses = statuses_of(state, models)
    situation = Fleet().situation(state, statuses, name, 2.0)
    decision = policy.decide(situation)
    choice = Choice(
        decision=decision,
        mean_tokens=situation.mean_tokens,
        shown=lambda state: [rank[-1] for rank in state.queued_in(policy.order).first(512)],
    )
    return lease(state, name, choice, most=statuses[name].num_free)


def run_with(
    rng: random.Random, models: Mapping[str, LatencyModel], num_groups: int, *, is_busy: bool, group_size: int = 4
) -> RunState:
    """Prompts of all lengths queued; of busy generators each holds a few samples."""
    state = open_state(
        group_size=group_size, groups_per_step=num_groups, max_staleness=1, max_completion_tokens=1 << 15
    )
    lengths = [rng.uniform(50.0, 9000.0) for _ in range(num_groups)]
    submit(state, *(f"g{number}" for number in range(num_groups)))
    for number, length in enumerate(lengths):
        with state.edit(f"g{number}") as group:
            for sample in group.samples:
                sample.predicted_tokens = length
    state.settle()
    for name in models if is_busy else ():
        lease(state, name, generation.EVERYTHING, most=rng.randint(1, 3))
    return state


def held(state: RunState) -> dict[str, set[SampleId]]:
    return {name: set(leases.values()) for name, leases in state.generation_leases.items()}


def names(count: int) -> list[str]:
    return [f"gen-{number:03}" for number in range(count)]


@pytest.mark.parametrize("policy", ["lpt", "streamrl", "least_loaded"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_alike_generators_get_what_each_would_get_alone(policy: str, is_busy: bool) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        models = dict.fromkeys(names(rng.randint(2, 8)), MODEL)
        num_groups = rng.randint(1, 100)
        # Groups of one: siblings are as long as each other, and which of two goes where is left to chance.
        states = [run_with(random.Random(seed), models, num_groups, is_busy=is_busy, group_size=1) for _ in range(2)]
        asks, one_by_one = Asks(states[0], models, policy), make_policy(policy)
        for name in models:
            if is_done_with_its_part(asks, name):
                # Whoever helps with the other part of `streamrl` is counted on by that part from then on.
                break
            asks.ask(name)
            alone(states[1], one_by_one, models, name)
        assert held(states[0]) == held(states[1]), seed


def is_done_with_its_part(asks: Asks, name: str) -> bool:
    planned = asks.planner.planned
    return planned is not None and planned.should_help(asks.state, name)


def filled(num_generators: int, num_groups: int, policy: str = "lpt") -> tuple[Asks, int, int]:
    """All ask until nothing is queued: the asks, how many there were, and the most that one of them placed."""
    models = dict.fromkeys(names(num_generators), MODEL)
    asks = Asks(run_with(random.Random(1), models, num_groups, is_busy=False), models, policy)
    num_asks, most_placed = 0, 0
    while asks.state.queue:
        for name in models:
            if asks.state.queue and len(asks.state.generation_leases.get(name, ())) < NUM_SLOTS:
                num_placed = asks.num_placed
                asks.ask(name)
                num_asks += 1
                most_placed = max(most_placed, asks.num_placed - num_placed)
    return asks, num_asks, most_placed


@pytest.mark.parametrize("policy", ["lpt", "streamrl"])
def test_what_a_lease_costs_does_not_depend_on_the_number_of_generators(policy: str) -> None:
    tried: dict[int, float] = {}
    for num_generators in (4, 32, 128):
        asks, num_asks, most_placed = filled(num_generators, num_generators * NUM_SLOTS // 4, policy)
        tried[num_generators] = asks.num_tried / (num_generators * NUM_SLOTS)
        assert num_asks < 2 * num_generators + 8
        assert most_placed <= MAX_PLACED + 4
    # By the number of generators it would be 32 times as many.
    assert max(tried.values()) < 2.5 * min(tried.values()), tried
    assert max(tried.values()) < 32


def test_what_is_kept_for_a_generator_that_does_not_ask_goes_to_another_with_the_next_plan() -> None:
    models = dict.fromkeys(names(2), MODEL)
    asks = Asks(run_with(random.Random(2), models, 4, is_busy=False), models)
    assert len(asks.ask("gen-000").grants) == 8
    left = asks.ask("gen-000")
    assert (left.grants, left.reason) == ([], generation.LEFT_TO_OTHERS)
    # Now it holds all that is out, and the other is as soon done with what is left; until it is gone.
    del models["gen-001"]
    assert asks.ask("gen-000", now_s=2.0 + REFRESH_S / 2).grants == []
    assert len(asks.ask("gen-000", now_s=2.0 + REFRESH_S).grants) == 8


def test_an_evaluation_that_comes_later_is_leased_before_what_was_placed() -> None:
    models = dict.fromkeys(names(2), MODEL)
    asks = Asks(run_with(random.Random(2), models, 40, is_busy=False), models)
    asks.ask("gen-000")
    submit(asks.state, "evaluation", purpose=types_pb2.PURPOSE_EVALUATE)
    asks.state.settle()
    first = asks.ask("gen-001", now_s=2.0 + REFRESH_S).grants[0]
    assert first.sample[0] == "evaluation"


def test_what_expired_is_leased_again_though_it_was_placed() -> None:
    models = dict.fromkeys(names(2), MODEL)
    asks = Asks(run_with(random.Random(2), models, 8, is_busy=False), models)
    granted = {grant.sample for name in models for grant in asks.ask(name).grants}
    assert not asks.state.queue
    generation.expire(asks.state, 1000.0)
    asks.state.settle()
    again = {grant.sample for name in models for grant in asks.ask(name, now_s=1000.0).grants}
    assert again == granted


def test_a_generator_that_may_start_nothing_is_kept_nothing_new() -> None:
    models = dict.fromkeys(names(2), MODEL)
    state = run_with(random.Random(2), models, 8, is_busy=False)
    begun = lease(state, "gen-000", generation.EVERYTHING, most=1).grants[0].sample[0]
    asks = Asks(state, models)
    assert {grant.sample[0] for grant in asks.ask("gen-001", may_start=False).grants} <= {begun}
    assert len(asks.ask("gen-000", now_s=3.0).grants) >= 14


@pytest.mark.parametrize("policy", ["lpt", "streamrl", "auto"])
def test_every_sample_is_leased_once_whoever_asks_and_however_fast(policy: str) -> None:
    rng = random.Random(3)
    models = {name: MODEL.scaled(rng.choice([1.0, 1.6, 4.0])) for name in names(6)}
    asks = Asks(run_with(rng, models, 20, is_busy=True), models, policy)
    now_s = 2.0
    for _ in range(400):
        now_s += 0.1
        asks.ask(rng.choice(list(models)), now_s=now_s)
    # Nothing ends here: what is left waits for the fast ones, or for whoever waited too long.
    num_left = len(lease(asks.state, "gen-late", generation.EVERYTHING, most=80).grants)
    assert num_left < 20
    assert sum(len(leases) for leases in asks.state.generation_leases.values()) == 80
    assert len(set().union(*held(asks.state).values())) == 80
    assert asks.state.leased_lengths.num_samples == 80


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """The calls of a function from now on."""
    calls: list[object] = []
    real: Callable[..., object] = getattr(owner, name)

    def call(*arguments: object, **named: object) -> object:
        calls.append(arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_leased_lengths_follow_the_records() -> None:
    models = dict.fromkeys(names(2), MODEL)
    state = run_with(random.Random(4), models, 4, is_busy=True)
    lengths = sorted(state.leased_lengths.items())
    assert sum(count for _, count in lengths) == sum(len(leases) for leases in state.generation_leases.values()) > 0
    assert all(
        state.groups[group_id].samples[index].state == broker_pb2.SAMPLE_STATE_LEASED
        for leases in state.generation_leases.values()
        for group_id, index in leases.values()
    )
    generation.expire(state, 1000.0)
    assert state.leased_lengths.num_samples == 0
    assert list(state.leased_lengths.items()) == []
