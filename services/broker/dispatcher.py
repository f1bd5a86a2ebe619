"""Dispatch of one run in one broker process: which policy, over which picture of the fleet.

Everything here is a hint that may be lost: what was decided rests in the run's records. No wait without an end: a
generator that is left without work for MAX_LEFT_S although some is queued and it may take it, takes it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.v1 import broker_pb2
from services.broker import moves
from services.broker.dispatch.auto import Auto
from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.registry import make_policy
from services.broker.dispatch.types import DispatchPolicy, Prompt
from services.broker.fleet import Fleet, prompts_in_slices
from services.broker.generation import EVERYTHING, Choice, GeneratorFacts, Grant
from services.broker.peers import Peers
from services.broker.planner import Planner
from services.broker.run_state import RunState
from services.broker.statuses import Statuses

MAX_LEFT_S = 30.0
REVIEW_EVERY_S = 1.0
MAX_REVIEW_SHARE = 0.05
"""Of a core that reviews may take; a large fleet is reviewed less often."""
MAX_LOOK_S = 5.0
"""A look ahead that takes longer is given up: what it would say is of a queue that is gone."""
MANY = 32
MOVE_LOOK_S = 0.0001
"""In a fleet of more than MANY, so long for each generator no other idle one looks for work that should move: twenty
times what a look takes."""
MAX_BEAT_AGE_S = 6.0
"""A generator that beat longer ago (they beat at least every 5 s) is not counted on to take anything."""


class Dispatcher:
    """See the module."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._fleet = Fleet()
        self._planner = Planner(self._fleet)
        self._statuses = Statuses()
        self._policy: DispatchPolicy = Fifo()
        self._left_since_s: dict[str, float] = {}
        self._review_s = self._move_again_s = -math.inf

    def choose(self, state: RunState, generator: GeneratorFacts, max_leases: int, now_s: float) -> Choice:
        """How to answer a generator that asks for up to `max_leases` samples."""
        policy = self._policy_of(state)
        left_since_s = self._left_since_s.get(generator.generator_id, now_s)
        if not policy.needs_situation or now_s - left_since_s >= MAX_LEFT_S:
            return EVERYTHING
        may_start = state.admission().judge(
            generator_version=generator.policy_version, min_version=None, prompt_min_version=None
        )
        view = self._peers.generator(generator.generator_id)
        asking = self._statuses.of_asking(view, generator, max_leases, may_start=may_start.is_allowed)
        return self._planner.choose(state, policy, asking, lambda: self._statuses.of(self._starting(state)), now_s)

    def note(self, generator_id: str, *, is_left: bool, now_s: float) -> None:
        """What came of it: whether the generator was left without work that it may take."""
        if not is_left:
            self._left_since_s.pop(generator_id, None)
        else:
            self._left_since_s.setdefault(generator_id, now_s)

    @property
    def num_late_looks(self) -> int:
        """Looks ahead that were given up."""
        return self._policy.num_late if isinstance(self._policy, Auto) else 0

    async def review(self, state: RunState, now_s: float) -> None:
        """Think again about what holds for longer than one answer; called by the caretaker.

        In a thread, on a copy of the picture that is made in slices: a look ahead takes seconds, and streams must not
        wait. It gives way to them every few milliseconds, and is given up after MAX_LOOK_S.
        """
        policy = self._policy_of(state)
        if not policy.needs_situation or now_s < self._review_s:
            return
        self._review_s = now_s + REVIEW_EVERY_S
        self._fleet.measure(state)
        statuses = self._statuses.of(self._starting(state))
        if not statuses or not state.queue:
            return
        situation = self._fleet.situation(state, statuses, min(statuses), now_s).copy()
        prompts: list[Prompt] = []
        for part in prompts_in_slices(state):
            prompts += part
            await asyncio.sleep(0)
        started_s = time.perf_counter()
        await asyncio.to_thread(policy.review, replace(situation, prompts=prompts))
        self._review_s = now_s + max(REVIEW_EVERY_S, (time.perf_counter() - started_s) / MAX_REVIEW_SHARE)

    def take_over(
        self, state: RunState, generator: GeneratorFacts, max_leases: int, now_s: float, make_suffix: Callable[[], str]
    ) -> list[Grant]:
        """Move work of other generators to one that finds nothing to lease; see `moves`."""
        # Of all: near the end of a step nobody may start anything, and it is then that work moves.
        live = self._live()
        if len(live) > MANY:
            if now_s < self._move_again_s:
                return []
            self._move_again_s = now_s + MOVE_LOOK_S * len(live)
        statuses = self._statuses.of(live)
        view = self._peers.generator(generator.generator_id)
        statuses[generator.generator_id] = self._statuses.of_asking(view, generator, max_leases)
        situation = self._fleet.situation(state, statuses, generator.generator_id, now_s)
        num_waiting = {view.hello.generator_id: view.beat.num_waiting for view in live}
        return moves.take_over(
            state, generator, situation, num_waiting=num_waiting, now_s=now_s, make_suffix=make_suffix
        )

    def describe(self, state: RunState, forecasts: str) -> str:
        """How dispatch decides now, for people; `forecasts` says where lengths come from."""
        policy = self._policy_of(state)
        if isinstance(policy, Auto) and policy.picked is not None:
            why = f" ({policy.late})" if policy.late else ""
            return f"auto, now {policy.picked.name}{why}: {forecasts}"
        return f"{policy.name}: {forecasts}"

    def _policy_of(self, state: RunState) -> DispatchPolicy:
        if self._policy.name != state.policy.dispatch:
            self._policy = make_policy(state.policy.dispatch, look_limit_s=MAX_LOOK_S)
        return self._policy

    def _live(self) -> list[broker_pb2.GeneratorView]:
        return self._peers.generators(max_age_s=MAX_BEAT_AGE_S)

    def _starting(self, state: RunState) -> list[broker_pb2.GeneratorView]:
        """The generators that may start new work now."""
        admission = state.admission()
        may_start: dict[int, bool] = {}
        found: list[broker_pb2.GeneratorView] = []
        for view in self._live():
            version = view.beat.policy_version
            if version not in may_start:
                may_start[version] = admission.judge(
                    generator_version=version, min_version=None, prompt_min_version=None
                ).is_allowed
            if may_start[version] and not view.beat.is_draining:
                found.append(view)
        return found
