"""Plays sessions of several turns against the generators, placed in one way or the other.

A turn is a request of token ids to /inference/v1/generate: all that came before, then what the environment gave. By
session, its header is all that the request says of a place, and it is sent to any generator; by load, it names no
session and goes to the generator with the fewest requests under way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import aiohttp

from benchmarks.broker.processes import cpu_s
from services.generator.engine.engine import EngineStats

VOCAB_SIZE = 512
"""Of the model; prompts are drawn from all of it."""
_TIMEOUT_S = 600.0


class Counting(Protocol):
    """An engine, as far as it is looked at."""

    def stats(self) -> EngineStats:
        """Its counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A generator that answers."""

    address: str
    engine: Counting


class Way(StrEnum):
    """How turns are placed."""

    SESSION = "by session"
    LOAD = "by load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sessions of a round."""

    num_sessions: int = 16
    num_at_once: int = 8
    num_turns: int = 4
    prompt_tokens: int = 512
    turn_tokens: int = 32
    given_tokens: int = 320
    """What the environment gives between two turns."""
    longest_wait_s: float = 1.0
    """What it takes for that, from 0 on, drawn evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What was measured."""

    duration_s: float
    cpu_s: float
    """Of this process and the engines."""
    later_turn_s: float
    """Median of the turns after the first."""
    cached_share: float
    """Of all prompt tokens, those that an engine had cached."""
    busier_share: float
    """Of all prompt tokens, those of the engine that was given more."""


async def play(generators: Sequence[Serving], workload: Workload, way: Way, *, seed: int) -> Round:
    """A round of new sessions, no two with a common prefix."""
    player = _Player(generators, workload, way, random.Random(seed))
    before = [each.engine.stats() for each in generators]
    begun_s, begun_cpu_s = time.monotonic(), cpu_s(os.getpid())
    await player.play()
    duration_s, spent_s = time.monotonic() - begun_s, cpu_s(os.getpid()) - begun_cpu_s
    after = [each.engine.stats() for each in generators]
    asked = [now.prompt_tokens - old.prompt_tokens for now, old in zip(after, before, strict=True)]
    cached = [now.cached_tokens - old.cached_tokens for now, old in zip(after, before, strict=True)]
    return Round(
        duration_s=duration_s,
        cpu_s=spent_s,
        later_turn_s=statistics.median(player.later_turns_s),
        cached_share=sum(cached) / sum(asked),
        busier_share=max(asked) / sum(asked),
    )


class _Player:
    def __init__(self, generators: Sequence[Serving], workload: Workload, way: Way, numbers: random.Random) -> None:
        self._addresses = [each.address for each in generators]
        self._any = itertools.cycle(self._addresses)
        self._workload, self._way, self._numbers = workload, way, numbers
        self._under_way: Counter[str] = Counter()
        self.later_turns_s: list[float] = []

    async def play(self) -> None:
        places = asyncio.Semaphore(self._workload.num_at_once)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
            for _ in range(self._workload.num_sessions):
                group.create_task(self._session(http, places))

    async def _session(self, http: aiohttp.ClientSession, places: asyncio.Semaphore) -> None:
        name = f"s{self._numbers.getrandbits(64):x}"
        async with places:
            tokens = self._drawn(self._workload.prompt_tokens)
            for turn in range(self._workload.num_turns):
                begun_s = time.monotonic()
                tokens += await self._turn(http, name, tokens)
                if turn:
                    self.later_turns_s.append(time.monotonic() - begun_s)
                if turn + 1 < self._workload.num_turns:
                    await asyncio.sleep(self._numbers.uniform(0, self._workload.longest_wait_s))
                    tokens += self._drawn(self._workload.given_tokens)

    async def _turn(self, http: aiohttp.ClientSession, name: str, tokens: list[int]) -> list[int]:
        address = next(self._any)
        if self._way is Way.LOAD:
            # Drawn where they are equal: in turns, sessions in step would find their old place by accident.
            address = min(self._addresses, key=lambda each: (self._under_way[each], self._numbers.random()))
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": self._workload.turn_tokens, "temperature": 1.0}}
        headers = {"X-Session-ID": name} if self._way is Way.SESSION else {}
        self._under_way[address] += 1
        try:
            url = f"http://{address}/inference/v1/generate"
            async with http.post(url, json=body, headers=headers) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"{address}: {response.status}: {answer}")
        finally:
            self._under_way[address] -= 1
        sampled: list[int] = answer["choices"][0]["token_ids"]
        return sampled

    def _drawn(self, count: int) -> list[int]:
        return [self._numbers.randrange(VOCAB_SIZE) for _ in range(count)]
