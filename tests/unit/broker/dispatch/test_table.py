"""That the index of a fleet finds the generator that weighing every one of them finds, at a cost that stays flat."""

from __future__ import annotations

import random

import pytest

from services.broker.dispatch.dealing.table import Table
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.situation import Order, Rule, Work

LENGTH_ERROR, RISK = 0.3, 1.8221188003905089
"""The factor is two standard deviations."""
MODELS = (
    LatencyModel(base_s=0.01, per_sample_s=0.0001, max_samples=32),
    LatencyModel(base_s=0.0105, per_sample_s=0.0001, per_kv_token_s=1e-8, max_samples=32),
)


def _load(model: LatencyModel, rng: random.Random) -> Load:
    load = Load(model=model, max_samples=model.max_samples, max_leases=model.max_samples)
    for _ in range(rng.randrange(8)):
        load.add(rng.lognormvariate(6.0, 1.0), rng.randrange(500))
    return load


def _work(rng: random.Random) -> Work:
    length = rng.lognormvariate(6.0, 1.0)
    return Work(num_samples=1, context_tokens=rng.randrange(500), length_tokens=length, remaining_tokens=length)


@pytest.mark.parametrize("seed", range(20))
def test_the_generator_that_finishes_first_is_found(seed: int) -> None:
    rng = random.Random(seed)
    table = Table(Rule(order=Order.LENGTH), length_error=LENGTH_ERROR)
    members = [
        table.put(f"gen-{number}", _load(rng.choice(MODELS), rng), policy_version=0, is_here=True)
        for number in range(24)
    ]
    for _ in range(400):
        work = _work(rng)
        ends_s = [
            member.load.finish_s(work.remaining_tokens, work.context_tokens, risk=RISK)
            for member in members
            if member.load.room
        ]
        found = table.first_done(work, table.kinds)
        assert found is not None
        end_s = found.load.finish_s(work.remaining_tokens, work.context_tokens, risk=RISK)
        assert end_s == pytest.approx(min(ends_s))
        table.add(found, work)


def _num_tried(num_generators: int) -> float:
    """Generators looked at for each sample while a fleet fills."""
    rng = random.Random(0)
    table = Table(Rule(order=Order.LENGTH), length_error=LENGTH_ERROR)
    for number in range(num_generators):
        load = Load(model=MODELS[0], max_samples=32, max_leases=32)
        table.put(f"gen-{number}", load, policy_version=0, is_here=True)
    work = sorted((_work(rng) for _ in range(16 * num_generators)), key=lambda item: -item.length_tokens)
    for item in work:
        found = table.first_done(item, table.kinds)
        assert found is not None
        table.add(found, item)
    return table.num_tried / len(work)


def test_a_large_fleet_is_not_looked_through() -> None:
    assert _num_tried(256) < 256 / 16


def test_a_full_fleet_takes_nothing_and_a_removed_generator_neither() -> None:
    table = Table(Rule(order=Order.LENGTH), length_error=0.0)
    work = _work(random.Random(0))
    full = Load(model=MODELS[0], max_samples=1, max_leases=1)
    member = table.put("gen-0", full, policy_version=0, is_here=True)
    assert table.first_done(work, table.kinds) is member
    table.add(member, work)
    assert table.first_done(work, table.kinds) is None
    assert not table.is_open
    table.put("gen-1", Load(model=MODELS[0], max_samples=1, max_leases=1), policy_version=0, is_here=True)
    table.remove("gen-1")
    assert table.first_done(work, table.kinds) is None
    assert not table.is_open
