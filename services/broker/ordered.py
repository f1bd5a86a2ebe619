"""A sorted set of small tuples: the queues of a run. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=tuple[int, ...])


class SortedKeys(Generic[_Key]):
    """Keys in ascending order, each once. Adding and removing move memory, which is quick up to some 10,000 keys."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._keys)

    def first(self, count: int) -> list[_Key]:
        """A copy of the smallest `count` keys, safe to loop over while the set changes."""
        return list(islice(self._keys, count))

    def add(self, key: _Key) -> None:
        """Add a key; nothing happens when it is there."""
        position = bisect_left(self._keys, key)
        if position == len(self._keys) or self._keys[position] != key:
            self._keys.insert(position, key)

    def discard(self, key: _Key) -> None:
        """Remove a key; nothing happens when it is not there."""
        position = bisect_left(self._keys, key)
        if position < len(self._keys) and self._keys[position] == key:
            del self._keys[position]
