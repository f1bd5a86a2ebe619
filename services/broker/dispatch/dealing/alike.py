"""Indexes generators of one model that have free capacity by when each would finish one more sample. Pure.

A generator whose longest sample has L tokens to go finishes another one of r tokens, taken as R long, after (`latency`)

    rest_s + base_s * max(L, R) + the time that the sample itself adds
    with rest_s = per_sample_s * sum of tokens + per_kv_token_s * KV reads

Of those with L below R the one with the least rest_s is first, of the others the one with the least
rest_s + base_s * L. Generators are classed by L: of every class but the one that R falls into, one is looked at; that
one is divided into fine classes, of which the same holds. In the fine class of R both orders are read side by side
until no generator further down can be sooner (the threshold algorithm of Fagin, Lotem and Naor 2001).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from services.broker.dispatch.latency import LatencyModel, Load, kv_reads

CLASSES_PER_DOUBLING = 4
FINE_PER_CLASS = 16
_Entries = list[tuple[float, int]]
_Place = tuple[int, float, float]
"""Fine class, end of everything it holds, and `rest_s`."""


class _Orders:
    """The generators of each class, by end and by `rest_s`; no class is empty."""

    def __init__(self) -> None:
        self.classes: dict[int, tuple[_Entries, _Entries]] = {}

    def add(self, length: int, end_s: float, rest_s: float, number: int) -> None:
        by_end, by_rest = self.classes.setdefault(length, ([], []))
        insort(by_end, (end_s, number))
        insort(by_rest, (rest_s, number))

    def remove(self, length: int, end_s: float, rest_s: float, number: int) -> None:
        by_end, by_rest = self.classes[length]
        del by_end[bisect_left(by_end, (end_s, number))]
        del by_rest[bisect_left(by_rest, (rest_s, number))]
        if not by_end:
            del self.classes[length]


class Alike:
    """See the module. Generators are known by numbers; among equally good ones the smallest is first."""

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._places: dict[int, _Place] = {}
        self._coarse, self._fine = _Orders(), _Orders()
        self.num_tried = 0
        """Generators looked at so far."""

    def __len__(self) -> int:
        return len(self._places)

    def put(self, number: int, load: Load) -> None:
        """Add a generator, or replace its load."""
        self.discard(number)
        model = self._model
        rest_s = model.per_sample_s * load.sum_tokens + model.per_kv_token_s * load.sum_kv_tokens
        end_s = rest_s + model.base_s * load.longest_tokens
        fine = _fine_class(load.longest_tokens)
        self._places[number] = (fine, end_s, rest_s)
        self._fine.add(fine, end_s, rest_s, number)
        self._coarse.add(fine // FINE_PER_CLASS, end_s, rest_s, number)

    def discard(self, number: int) -> None:
        """Remove a generator, if present."""
        place = self._places.pop(number, None)
        if place is not None:
            fine, end_s, rest_s = place
            self._fine.remove(fine, end_s, rest_s, number)
            self._coarse.remove(fine // FINE_PER_CLASS, end_s, rest_s, number)

    def first_done(
        self, remaining: float, context: float, *, risk: float, before: tuple[float, int]
    ) -> tuple[float, int]:
        """When the first one would finish one more sample, and its number; `before` unless that is earlier.

        Args:
            remaining: Expected remaining tokens of the sample.
            context: Tokens it holds.
            risk: Factor by which it may exceed that, at least 1.
            before: Time and number to beat.
        """
        model = self._model
        own_s = model.per_sample_s * remaining + model.per_kv_token_s * kv_reads(remaining, context)
        longest_s = model.base_s * remaining * risk
        fine = _fine_class(remaining * risk)
        mine = fine // FINE_PER_CLASS
        best = (before[0] - own_s, before[1])
        for length, orders in self._coarse.classes.items():
            if length != mine:
                best = min(best, self._first_in(orders, longest_s, holds_longer=length > mine))
        if mine in self._coarse.classes:
            for length in range(FINE_PER_CLASS * mine, FINE_PER_CLASS * (mine + 1)):
                orders_here = self._fine.classes.get(length)
                if orders_here is None:
                    continue
                if length == fine:
                    best = self._first_of(orders_here, longest_s, best)
                else:
                    best = min(best, self._first_in(orders_here, longest_s, holds_longer=length > fine))
        return best[0] + own_s, best[1]

    def _first_in(
        self, orders: tuple[_Entries, _Entries], longest_s: float, *, holds_longer: bool
    ) -> tuple[float, int]:
        """The first of a class in which all hold longer samples than the new one, or all shorter ones."""
        self.num_tried += 1
        by_end, by_rest = orders
        if holds_longer:
            return by_end[0]
        rest_s, number = by_rest[0]
        return rest_s + longest_s, number

    def _first_of(
        self, orders: tuple[_Entries, _Entries], longest_s: float, best: tuple[float, int]
    ) -> tuple[float, int]:
        """The first of a class in which some hold longer samples than the new one and some do not."""
        for (end_s, one), (rest_s, other) in zip(*orders, strict=True):
            if max(end_s, rest_s + longest_s) > best[0]:
                break
            for number in (one, other):
                self.num_tried += 1
                _, its_end_s, its_rest_s = self._places[number]
                best = min(best, (max(its_end_s, its_rest_s + longest_s), number))
        return best


def _fine_class(num_tokens: float) -> int:
    return -1 if num_tokens < 1.0 else int(FINE_PER_CLASS * CLASSES_PER_DOUBLING * math.log2(num_tokens))
