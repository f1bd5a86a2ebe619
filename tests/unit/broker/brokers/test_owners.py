"""Which broker owns which shard: the same everywhere, even, and moved only as far as needed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.broker.brokers.owners import core_owner, shard_owners

NAMES = [f"10.0.0.{number}:7301" for number in range(1, 9)]


@pytest.mark.parametrize("num_shards", [1, 3, 8, 64, 1000])
@pytest.mark.parametrize("num_brokers", [1, 2, 3, 8])
def test_every_broker_has_its_share(num_shards: int, num_brokers: int) -> None:
    owners = shard_owners(NAMES[:num_brokers], "run-1", num_shards)
    assert len(owners) == num_shards
    assert max(Counter(owners).values()) == -(-num_shards // num_brokers)


def test_the_order_in_which_brokers_are_known_does_not_matter() -> None:
    shuffled = random.Random(1).sample(NAMES, len(NAMES))
    assert shard_owners(shuffled, "run-1", 64) == shard_owners(NAMES, "run-1", 64)
    assert core_owner(shuffled, "run-1") == core_owner(NAMES, "run-1")


@pytest.mark.parametrize("run_id", ["run-1", "math-7b", "x"])
def test_a_broker_that_leaves_or_joins_moves_little_more_than_its_own_shards(run_id: str) -> None:
    num_shards = 240
    all_of_them = shard_owners(NAMES, run_id, num_shards)
    for gone in NAMES:
        rest = shard_owners([name for name in NAMES if name != gone], run_id, num_shards)
        moved = sum(before != after for before, after in zip(all_of_them, rest, strict=True))
        assert num_shards // 8 <= moved <= 2 * num_shards // 8


def test_runs_are_spread_differently() -> None:
    assert shard_owners(NAMES, "run-1", 8) != shard_owners(NAMES, "run-2", 8)
    assert len({core_owner(NAMES, f"run-{number}") for number in range(100)}) == len(NAMES)
