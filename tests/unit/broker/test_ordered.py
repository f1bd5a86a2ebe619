from __future__ import annotations

import random

import pytest

from services.broker import ordered
from services.broker.ordered import SortedKeys


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_sorted_set_whatever_is_added_and_removed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "MAX_BLOCK", 4)
    rng, keys, wanted = random.Random(seed), SortedKeys[tuple[int, int]](), set[tuple[int, int]]()
    for _ in range(1_000):
        key = (rng.randrange(3), rng.randrange(30))
        if rng.random() < 0.55:
            keys.add(key)
            wanted.add(key)
        else:
            keys.discard(key)
            wanted.discard(key)
        assert list(keys) == sorted(wanted)
        assert len(keys) == len(wanted)
    assert keys.first(3) == sorted(wanted)[:3]
    for key in list(keys):
        keys.discard(key)
    assert not keys
