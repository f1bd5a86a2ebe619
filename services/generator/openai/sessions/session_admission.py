"""Decides when agents may begin another group: no earlier than the trainer can use it.

The broker's own rule, that of the run's StalenessPolicy (`penstock.staleness`), applied where a group begins: a slow
trainer holds agents back, instead of samples growing too old in the queue. Advice only: the broker decides when the
group is put.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.staleness.policy import max_begun
from penstock.staleness.registry import DEFAULT, POLICIES
from penstock.v1 import broker_pb2

POLL_S = 0.25
"""Interval of broker queries while a group waits."""


def has_room(run: broker_pb2.GetRunResponse, *, version: int, num_begun: int) -> bool:
    """Whether a generator at `version` may begin another group after `num_begun`; dropped ones do not count."""
    policy = POLICIES.get(run.policy.stale, DEFAULT)
    # The broker does not have the prompt of an agent's group.
    counted = policy.start_version(trainer=run.policy_version, generator=version, can_restart=False)
    return num_begun < max_begun(run.limits, counted)


@dataclass(slots=True)
class Transit:
    """Groups between this process and the broker's counters."""

    num_taken: int = 0
    """Groups taken from the sessions so far, to be put."""
    num_settled: int = 0
    """Those that the broker has answered for."""


class SessionAdmission:
    """Lets groups begin.

    Args:
        get_run: Queries the broker.
        version: The version loaded by this generator; None before the first.
        transit: Kept up to date by the sender of groups.
        monotonic_s: The monotonic time.
    """

    def __init__(
        self,
        get_run: Callable[[], Awaitable[broker_pb2.GetRunResponse]],
        *,
        version: Callable[[], int | None],
        transit: Transit,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._get_run = get_run
        self._version = version
        self._transit = transit
        self._monotonic_s = monotonic_s
        self._asking = asyncio.Lock()
        self._view: _View | None = None

    async def wait(self, *, num_held: Callable[[], int], is_needed: Callable[[], bool]) -> None:
        """Returns when another group may begin, or is no longer needed; the caller sets the deadline.

        The caller must begin it at once, without awaiting, so that every other waiter counts it.

        Args:
            num_held: Groups that have members here.
            is_needed: False once a sibling has begun the group.

        Raises PenstockError if the broker does not answer.
        """
        while is_needed():
            view = await self._current()
            version = self._version()
            num_begun = view.num_begun + self._transit.num_taken - view.num_settled + num_held()
            held_version = view.run.policy_version if version is None else version
            if has_room(view.run, version=held_version, num_begun=num_begun):
                return
            await asyncio.sleep(POLL_S)

    async def _current(self) -> _View:
        async with self._asking:
            if self._view is None or self._monotonic_s() - self._view.asked_s >= POLL_S:
                asked_s, num_settled = self._monotonic_s(), self._transit.num_settled
                run = await self._get_run()
                num_samples = run.audit.trained + run.audit.in_flight
                self._view = _View(
                    run=run,
                    num_begun=-(-num_samples // run.limits.group_size),
                    num_settled=num_settled,
                    asked_s=asked_s,
                )
            return self._view


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The broker's answer."""

    run: broker_pb2.GetRunResponse
    num_begun: int
    num_settled: int
    """Groups settled when the query was sent: the answer may not include later ones."""
    asked_s: float
