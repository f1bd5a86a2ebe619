"""Has the token shards that this process owns attended, of every open run of the store.

A shard that its former owner left in the midst of something is put right by its new one at once, though no client may
send anything for it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import structlog

from penstock.errors import PenstockError
from services.broker.brokers.membership import Membership

LOOK_EVERY_S = 0.5
AT_ONCE = 8

_Part = tuple[str, int]
_log = structlog.get_logger()


class Attended(Protocol):
    """The shards of this process; those that it does not own any more it finds out by itself."""

    async def attend(self, run_id: str, shard: int) -> None:
        """Take a shard over."""


class Attendance:
    """See the module.

    Args:
        shards: Those of this process.
        membership: Who owns what.
        keeping: A context in which the clock of a run is kept.
    """

    def __init__(
        self, shards: Attended, membership: Membership, *, keeping: Callable[[str], AbstractContextManager[object]]
    ) -> None:
        self._shards, self._membership, self._keeping = shards, membership, keeping
        self._attended: set[_Part] = set()
        self._runs: dict[str, ExitStack] = {}

    async def run(self) -> None:
        """Follow ownership until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._keep(set())

    async def look(self) -> None:
        """Bring what is attended to what is owned."""
        owned = self._owned()
        self._keep({run_id for run_id, _ in owned})
        self._attended &= owned
        missing, slots = sorted(owned - self._attended), asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._attend(part, slots) for part in missing))

    def _owned(self) -> set[_Part]:
        roll = self._membership.roll
        return {
            (run_id, shard)
            for run_id, num_shards in (roll.sharded.items() if roll is not None else ())
            for shard in range(1, num_shards + 1)
            if self._membership.owns(run_id, shard)
        }

    async def _attend(self, part: _Part, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                await self._shards.attend(*part)
            except PenstockError as error:
                _log.warning("a token shard is not attended yet", run_id=part[0], shard=part[1], error=str(error))
            else:
                self._attended.add(part)

    def _keep(self, run_ids: set[str]) -> None:
        for run_id in self._runs.keys() - run_ids:
            self._runs.pop(run_id).close()
        for run_id in run_ids - self._runs.keys():
            self._runs[run_id] = stack = ExitStack()
            stack.enter_context(self._keeping(run_id))
