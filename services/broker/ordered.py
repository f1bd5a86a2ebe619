"""A sorted set of small tuples: the queues of a run. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=tuple[int, ...])
MAX_BLOCK = 1024


class SortedKeys(Generic[_Key]):
    """Keys in ascending order, each once.

    In blocks, so that adding and removing move a few kilobytes however many keys there are: work is taken from the
    front of a queue of a hundred thousand groups as fast as from that of a hundred.
    """

    def __init__(self) -> None:
        self._blocks: list[list[_Key]] = []
        """None is empty; every key of one is smaller than those of the next."""
        self._last: list[_Key] = []
        """The largest key of each block."""
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def __iter__(self) -> Iterator[_Key]:
        return chain.from_iterable(self._blocks)

    def first(self, count: int) -> list[_Key]:
        """A copy of the smallest `count` keys, safe to loop over while the set changes."""
        return list(islice(self, count))

    def add(self, key: _Key) -> None:
        """Add a key; nothing happens when it is there."""
        if not self._blocks:
            self._blocks, self._last, self._num_keys = [[key]], [key], 1
            return
        at = min(bisect_left(self._last, key), len(self._blocks) - 1)
        block = self._blocks[at]
        position = bisect_left(block, key)
        if position < len(block) and block[position] == key:
            return
        insort(block, key, lo=position)
        self._num_keys += 1
        if len(block) > MAX_BLOCK:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._last[at : at + 1] = [block[half - 1], block[-1]]
        else:
            self._last[at] = block[-1]

    def discard(self, key: _Key) -> None:
        """Remove a key; nothing happens when it is not there."""
        at = bisect_left(self._last, key)
        if at == len(self._blocks):
            return
        block = self._blocks[at]
        position = bisect_left(block, key)
        if block[position] != key:
            return
        del block[position]
        self._num_keys -= 1
        if block:
            self._last[at] = block[-1]
        else:
            del self._blocks[at], self._last[at]
