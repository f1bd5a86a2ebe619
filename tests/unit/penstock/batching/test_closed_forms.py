"""The closed forms of the broker and of the scheduler say of a batch what playing it says."""

from __future__ import annotations

import random
from collections import deque

import pytest

from penstock.batching.batched_engine import BatchedEngine
from services.broker.dispatch.latency import LatencyModel, Load
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.layouts import layouts
from services.scheduler.cost_model.replica import ReplicaModel
from tests.helpers.plans.drawn_problems import drawn

NUM_LIVES = 12
"""Of each slot: how many samples it decodes before a rate is believed."""


def played_s(model: LatencyModel, samples: list[tuple[float, float]], *, slots: int) -> float:
    """When all samples, of tokens to go and of context, are done: each begins when a slot is free."""
    engine: BatchedEngine[None] = BatchedEngine(model.step_s)
    waiting = deque(samples)
    while waiting or engine.num_running:
        while waiting and engine.num_running < slots:
            to_go, context = waiting.popleft()
            engine.begin(None, length=to_go, kv_tokens=context + to_go / 2)
        engine.advance(engine.next_end_s)
        engine.pop_ended()
    return engine.clock_s


def drawn_load(seed: int, *, num_samples: int, slots: int) -> tuple[Load, list[tuple[float, float]]]:
    """What a generator holds, by the broker's closed form, and the same sample by sample."""
    rng = random.Random(seed)
    model = LatencyModel(
        base_s=rng.uniform(0.001, 0.02), per_sample_s=rng.uniform(0, 1e-3), per_kv_token_s=rng.choice([0.0, 1e-8, 1e-6])
    )
    samples = [(rng.lognormvariate(6, 1), float(rng.randint(0, 2000))) for _ in range(num_samples)]
    load = Load(model=model, max_samples=slots, max_leases=num_samples)
    for to_go, context in samples:
        load.add(to_go, context)
    return load, samples


@pytest.mark.parametrize("seed", range(30))
def test_a_load_that_runs_all_at_once_ends_when_it_says_exactly(seed: int) -> None:
    load, samples = drawn_load(seed, num_samples=24, slots=24)
    assert load.finish_s() == pytest.approx(played_s(load.model, samples, slots=24), rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_a_load_that_takes_turns_ends_no_sooner_than_it_says_and_by_less_than_its_longest_sample_later(
    seed: int,
) -> None:
    load, samples = drawn_load(seed, num_samples=60, slots=8)
    late_s = played_s(load.model, samples, slots=8) - load.finish_s()
    assert -1e-9 <= late_s <= load.model.base_s * load.longest_tokens


@pytest.mark.parametrize("seed", range(20))
def test_a_full_replica_has_the_rate_of_the_cost_model_within_three_percent(seed: int) -> None:
    rng = random.Random(seed)
    problem = drawn(seed)
    demand = demand_of(problem)
    node = rng.choice(problem.nodes)
    replica = ReplicaModel(problem, demand, node, *rng.choice(layouts(problem, demand, node)))
    batch = min(64, replica.batch())
    engine: BatchedEngine[None] = BatchedEngine(lambda num_samples, _kv_tokens: replica.step_s(num_samples))
    num_ended = 0

    def begin() -> None:
        engine.stall(replica.prefill_s)
        engine.begin(None, length=demand.completion_tokens * rng.uniform(0.5, 1.5))

    for _ in range(batch):
        begin()
    while num_ended < NUM_LIVES * batch:
        engine.advance(engine.next_end_s)
        for _ in engine.pop_ended():
            num_ended += 1
            begin()
    # What is under way is half done on average.
    rate = (num_ended + batch / 2) / engine.clock_s
    assert rate == pytest.approx(replica.samples_per_second(batch), rel=0.03)
