"""Generators of one model that have room, in an order in which the one that is done first is found soon. Pure.

A generator that holds L tokens in its longest sample and S in all is done with one more sample of r tokens, which may
well be R long, after (`latency`; one that has a slot free has nobody wait for a turn)

    T + base_s * max(L, R) + what the sample itself adds      where T = per_sample_s * S + per_kv_token_s * (KV reads)

Of those with L below R the one with the least T is first, of the others the one with the least T + base_s * L. They
are kept by their L, to a fifth: of each class but the one that R falls into, one generator is looked at. In that one
both orders are read side by side until none that was not seen can be sooner.

Source of the last: the threshold algorithm of Fagin, Lotem and Naor (2001), Optimal aggregation algorithms for
middleware.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from services.broker.dispatch.latency import LatencyModel, Load, kv_reads

CLASSES_PER_DOUBLING = 4
_Entries = list[tuple[float, int]]
_Place = tuple[int, float, float]
"""The class of a generator's longest sample, when it is done now, and how much of that is not the longest's."""


class Alike:
    """See the module. Generators go by a number each."""

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._places: dict[int, _Place] = {}
        self._classes: dict[int, tuple[_Entries, _Entries]] = {}
        """By class: the generators in order of when they are done, and in order of the rest; none is empty."""
        self.num_tried = 0
        """Generators looked at so far."""

    def __len__(self) -> int:
        return len(self._places)

    def put(self, number: int, load: Load) -> None:
        """Take a generator in, or note that its load changed."""
        self.discard(number)
        model = self._model
        rest_s = model.per_sample_s * load.sum_tokens + model.per_kv_token_s * load.sum_kv_tokens
        end_s = rest_s + model.base_s * load.longest_tokens
        length = _class(load.longest_tokens)
        self._places[number] = (length, end_s, rest_s)
        by_end, by_rest = self._classes.setdefault(length, ([], []))
        insort(by_end, (end_s, number))
        insort(by_rest, (rest_s, number))

    def discard(self, number: int) -> None:
        """Let a generator go, if it is here."""
        place = self._places.pop(number, None)
        if place is None:
            return
        length, end_s, rest_s = place
        by_end, by_rest = self._classes[length]
        del by_end[bisect_left(by_end, (end_s, number))]
        del by_rest[bisect_left(by_rest, (rest_s, number))]
        if not by_end:
            del self._classes[length]

    def first_done(
        self, remaining: float, context: float, *, risk: float, before_s: float, asking: int | None = None
    ) -> tuple[float, int | None]:
        """When the first of them would be done with a sample more, and which; None where none is before `before_s`.

        Args:
            remaining: Tokens the sample has to go.
            context: Tokens it holds.
            risk: How many times longer than that it may well be; at least 1.
            before_s: What must be undercut.
            asking: The generator that is preferred where it is no later than the others.
        """
        model = self._model
        own_s = model.per_sample_s * remaining + model.per_kv_token_s * kv_reads(remaining, context)
        longest_s = model.base_s * remaining * risk
        mine = _class(remaining * risk)
        best_s, best = before_s - own_s, None
        if asking is not None and (place := self._places.get(asking)) is not None:
            self.num_tried += 1
            asking_s = max(place[1], place[2] + longest_s)
            if asking_s < best_s:
                best_s, best = asking_s, asking
        for length, (by_end, by_rest) in self._classes.items():
            if length == mine:
                continue
            self.num_tried += 1
            end_s, number = by_end[0] if length > mine else by_rest[0]
            if length < mine:
                end_s += longest_s
            if end_s < best_s:
                best_s, best = end_s, number
        if mine in self._classes:
            best_s, best = self._first_of(mine, longest_s, best_s, best)
        return best_s + own_s, best

    def _first_of(self, length: int, longest_s: float, best_s: float, best: int | None) -> tuple[float, int | None]:
        """The first of a class of which some hold longer samples than the one to place and some do not."""
        for (end_s, one), (rest_s, other) in zip(*self._classes[length], strict=True):
            if max(end_s, rest_s + longest_s) >= best_s:
                break
            for number in (one, other):
                self.num_tried += 1
                _, its_end_s, its_rest_s = self._places[number]
                done_s = max(its_end_s, its_rest_s + longest_s)
                if done_s < best_s:
                    best_s, best = done_s, number
        return best_s, best


def _class(num_tokens: float) -> int:
    return -1 if num_tokens < 1.0 else int(CLASSES_PER_DOUBLING * math.log2(num_tokens))
