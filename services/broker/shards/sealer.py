"""Asks token shards how many tokens they have of samples whose leases ended, so that these can be leased again.

Promise: a sample is sealed before it is queued again, so no token stored under its old lease is lost or decoded twice.
What fails is asked again at the caretaker's next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Protocol

import structlog

from penstock.clock import Clock
from penstock.errors import PenstockError
from services.broker.operations import token_ends
from services.broker.records.store import SampleId
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.shards.shard_interfaces import TokenShards
from services.broker.state.run_state import RunState

MAX_SEALED = 1_024
"""Samples asked for at once."""

_log = structlog.get_logger()


class _Transact(Protocol):
    """`RunReplica.transact`."""

    def __call__(self, operation: Callable[[RunState], None], *, must_verify: bool) -> Awaitable[None]: ...


class Sealer:
    """Seals the samples of one run.

    Args:
        run_id: Which run.
        transact: The replica's.
        clock: The run's.
    """

    def __init__(self, run_id: str, transact: _Transact, clock: Clock) -> None:
        self._run_id, self._transact, self._clock = run_id, transact, clock
        self._task: asyncio.Task[None] | None = None

    def start(self, state: RunState, shards: TokenShards) -> None:
        """Seal what waits for it, in the background, one round at a time."""
        if state.sealing and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._seal_all(_requests(state), shards))

    async def _seal_all(self, requests: dict[int, list[SealRequest]], shards: TokenShards) -> None:
        await asyncio.gather(*(self._seal(shard, samples, shards) for shard, samples in requests.items()))

    async def _seal(self, shard: int, samples: Sequence[SealRequest], shards: TokenShards) -> None:
        try:
            tails = await shards.seal(self._run_id, shard, samples)
            reports = [
                TailReport(group_id=sample.group_id, sample_index=sample.sample_index, tail=tail)
                for sample, tail in zip(samples, tails, strict=True)
            ]
            now_s = self._clock.now_s()
            await self._transact(lambda state: token_ends.take_reports(state, shard, reports, now_s), must_verify=False)
        except PenstockError as error:
            _log.warning(
                "samples not sealed: asked again",
                run_id=self._run_id,
                shard=shard,
                num_samples=len(samples),
                error=str(error),
            )


def _requests(state: RunState) -> dict[int, list[SealRequest]]:
    """What to ask each shard."""
    requests: dict[int, list[SealRequest]] = {}
    for sample_id in islice(state.sealing, MAX_SEALED):
        requests.setdefault(state.groups[sample_id[0]].token_shard, []).append(_request(state, sample_id))
    return requests


def _request(state: RunState, sample_id: SampleId) -> SealRequest:
    group_id, index = sample_id
    sample = state.groups[group_id].samples[index]
    return SealRequest(group_id=group_id, sample_index=index, lease_id=sample.lease_id, attempt=sample.attempt)
