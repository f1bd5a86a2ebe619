"""Dispatches one run in one broker process: applies its policy to a snapshot of the fleet.

Everything here is a hint that may be lost: decisions are kept in the run's records. Every wait ends: a generator that
is left without work for MAX_LEFT_S although some is queued and it may take it, gets it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from penstock.v1 import broker_pb2
from services.broker.dispatch.auto import Auto
from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import DispatchPolicy
from services.broker.fleet import work_stealing
from services.broker.fleet.snapshot import Fleet, GeneratorStatus
from services.broker.fleet.worker_registry import Peers
from services.broker.operations.leasing import EVERYTHING, Choice, GeneratorFacts, Grant
from services.broker.state.run_state import RunState

MAX_LEFT_S = 30.0
REVIEW_EVERY_S = 1.0
MAX_REVIEW_SHARE = 0.05
"""Fraction of a core that reviews may use; a large fleet is reviewed less often."""
MAX_BEAT_AGE_S = 6.0
"""A generator with an older last heartbeat (they come at least every 5 s) is not expected to take work."""


class Dispatcher:
    """See the module."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._fleet = Fleet()
        self._policy: DispatchPolicy = Fifo()
        self._left_since_s: dict[str, float] = {}
        self._review_s = -math.inf

    def choose(self, state: RunState, generator: GeneratorFacts, max_leases: int, now_s: float) -> Choice:
        """How to answer a generator that asks for up to `max_leases` samples."""
        policy = self._policy_of(state)
        left_since_s = self._left_since_s.get(generator.generator_id, now_s)
        if not policy.needs_situation or now_s - left_since_s >= MAX_LEFT_S:
            return EVERYTHING
        statuses = _statuses(self._starting(state, generator.generator_id), generator, max_leases)
        situation = self._fleet.situation(state, statuses, generator.generator_id, now_s)
        decision = policy.decide(situation)
        return Choice(order=policy.order, decision=decision, mean_tokens=situation.mean_tokens)

    def note(self, generator_id: str, *, is_left: bool, now_s: float) -> None:
        """Report the outcome: whether the generator was left without work that it may take."""
        if not is_left:
            self._left_since_s.pop(generator_id, None)
        else:
            self._left_since_s.setdefault(generator_id, now_s)

    async def review(self, state: RunState, now_s: float) -> None:
        """Reconsider the choices that outlast one answer; called by the caretaker.

        In a thread, on a copy of the snapshot: a look-ahead takes tens of milliseconds, and streams must not wait.
        """
        policy = self._policy_of(state)
        if not policy.needs_situation or now_s < self._review_s:
            return
        self._review_s = now_s + REVIEW_EVERY_S
        self._fleet.measure(state)
        statuses = _statuses(self._starting(state), None, 0)
        if not statuses or not state.queue:
            return
        situation = self._fleet.look(state, statuses, now_s)
        started_s = time.perf_counter()
        await asyncio.to_thread(policy.review, situation.copy())
        self._review_s = now_s + max(REVIEW_EVERY_S, (time.perf_counter() - started_s) / MAX_REVIEW_SHARE)

    def take_over(
        self, state: RunState, generator: GeneratorFacts, max_leases: int, now_s: float, make_suffix: Callable[[], str]
    ) -> list[Grant]:
        """Move work of other generators to one that finds nothing to lease; see `work_stealing`."""
        # All generators: near the end of a step none may start anything, and that is when work moves.
        statuses = _statuses(self._live(), generator, max_leases)
        situation = self._fleet.situation(state, statuses, generator.generator_id, now_s)
        num_waiting = {view.hello.generator_id: view.beat.num_waiting for view in self._live()}
        return work_stealing.take_over(
            state, generator, situation, num_waiting=num_waiting, now_s=now_s, make_suffix=make_suffix
        )

    def describe(self, state: RunState, forecasts: str) -> str:
        """How dispatch decides now, for display; `forecasts` says where lengths come from."""
        policy = self._policy_of(state)
        if isinstance(policy, Auto) and policy.picked is not None:
            return f"auto, now {policy.picked.name}: {forecasts}"
        return f"{policy.name}: {forecasts}"

    def _policy_of(self, state: RunState) -> DispatchPolicy:
        if self._policy.name != state.policy.dispatch:
            self._policy = make_policy(state.policy.dispatch)
        return self._policy

    def _live(self) -> list[broker_pb2.GeneratorView]:
        return self._peers.generators(max_age_s=MAX_BEAT_AGE_S)

    def _starting(self, state: RunState, asking: str = "") -> list[broker_pb2.GeneratorView]:
        """The generators that may start new work now, and the one that asks, whether it may or not.

        Its load is needed in any case: it may continue samples that others began, and the version of its last known
        heartbeat may be older than the one with which it asks.
        """
        admission = state.admission()
        return [
            view
            for view in self._live()
            if view.hello.generator_id == asking
            or (not view.beat.is_draining and admission.judge(generator_version=view.beat.policy_version).is_allowed)
        ]


def _statuses(
    views: Sequence[broker_pb2.GeneratorView], asking: GeneratorFacts | None, max_leases: int
) -> dict[str, GeneratorStatus]:
    """The dispatch view of these generators and of the one that asks."""
    factors = [view.measured_step_factor for view in views if view.measured_step_factor]
    usual_factor = sum(factors) / len(factors) if factors else 1.0
    statuses = {view.hello.generator_id: _status(view, usual_factor) for view in views}
    if asking is not None:
        known = statuses.get(asking.generator_id)
        statuses[asking.generator_id] = GeneratorStatus(
            generator_id=asking.generator_id,
            model=known.model if known else LatencyModel().scaled(usual_factor),
            num_free=max_leases,
            max_context_tokens=asking.max_context_tokens,
            is_speed_known=known is not None and known.is_speed_known,
        )
    return statuses


def _status(view: broker_pb2.GeneratorView, usual_factor: float) -> GeneratorStatus:
    profile = view.hello.profile
    is_stated = profile.step_base_s > 0 or profile.step_per_sample_s > 0
    # Without measurements a stated profile is used; a generator without one counts as fast as the others.
    factor = view.measured_step_factor or (1.0 if is_stated else usual_factor)
    return GeneratorStatus(
        generator_id=view.hello.generator_id,
        model=LatencyModel.from_profile(profile).scaled(factor),
        num_free=view.num_free_leases,
        max_context_tokens=view.hello.max_context_tokens,
        is_speed_known=is_stated or bool(view.measured_step_factor),
    )
