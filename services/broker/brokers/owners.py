"""Deals the shards of a run to brokers. Pure: the same names give the same owners, at every broker.

Each shard goes to the broker of the highest weight, a hash of run, shard and name (rendezvous hashing), that does not
have its full share yet. So all have the same number but for one, and a broker that joins or leaves moves few shards.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]


def shard_owners(names: Collection[str], run_id: str, num_shards: int) -> list[str]:
    """The owner of each shard of a run, from shard 1 on; `names` has at least one."""
    brokers = sorted(names)
    parts = _mixed(np.arange(1, num_shards + 1, dtype=np.uint64) + np.uint64(_hash(run_id)))
    weights = _mixed(parts[:, None] ^ np.array([_hash(name) for name in brokers], np.uint64)[None, :])
    share = -(-num_shards // len(brokers))
    held: Counter[int] = Counter()
    owners: list[str] = []
    for ranking in np.argsort(weights, axis=1)[:, ::-1].tolist():
        chosen = next(broker for broker in ranking if held[broker] < share)
        held[chosen] += 1
        owners.append(brokers[chosen])
    return owners


def core_owner(names: Collection[str], run_id: str) -> str:
    """The owner of what is not in shards; `names` has at least one."""
    return max(names, key=lambda name: (_hash(f"{run_id}/{name}"), name))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(words: _Words) -> _Words:
    """Each word with its bits mixed (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
