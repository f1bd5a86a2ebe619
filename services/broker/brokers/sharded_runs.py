"""Knows the open runs with token shards, whichever broker they were opened at, and how many shards each has.

A run is noted with the roll when a broker first works on it, and looked up there by all. What is noted of runs that
were closed, deleted, or opened again otherwise is put right by a look at the runs every LOOK_EVERY_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from penstock.clock import Clock
from penstock.errors import PenstockError, UnknownRunError
from services.broker.brokers.membership import Membership
from services.broker.records.store import Store
from services.broker.records_pb2 import RunRecord

LOOK_EVERY_S = 5.0
KNOWN_FOR_S = 5.0
MAX_KNOWN = 1_024
ROOTS_AT_ONCE = 100

_log = structlog.get_logger()


class ShardedRuns:
    """See the module."""

    def __init__(self, store: Store, membership: Membership, clock: Clock) -> None:
        self._store, self._membership, self._clock = store, membership, clock
        self._known: dict[str, tuple[int, float]] = {}
        """Number of shards of runs that are not noted (yet), and until when that counts."""

    async def num_shards(self, run_id: str) -> int:
        """How many token shards a run has, 0 if none. Raises UnknownRunError, ServiceUnavailableError."""
        roll = self._membership.roll
        if roll is not None and run_id in roll.sharded:
            return roll.sharded[run_id]
        num_shards, until_s = self._known.get(run_id, (0, 0.0))
        now_s = self._clock.monotonic_s()
        if now_s < until_s:
            return num_shards
        [run] = await self._read([run_id])
        if run is None:
            raise UnknownRunError(f"run {run_id!r} is not open", run_id=run_id)
        if _to_note(run):
            await self._store.note_shards(run_id, _to_note(run))
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        num_shards = _num_shards(run)
        self._known[run_id] = num_shards, now_s + KNOWN_FOR_S
        return num_shards

    async def run(self) -> None:
        """Keep what is noted right, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
            except PenstockError as error:
                _log.warning("runs with token shards not looked at", error=str(error))

    async def look(self) -> None:
        """Look at every run that is noted once. Raises ServiceUnavailableError."""
        roll = self._membership.roll
        noted = sorted(roll.sharded.items()) if roll is not None else []
        for start in range(0, len(noted), ROOTS_AT_ONCE):
            part = noted[start : start + ROOTS_AT_ONCE]
            runs = await self._read([run_id for run_id, _ in part])
            for (run_id, num_shards), run in zip(part, runs, strict=True):
                if _to_note(run) != num_shards:
                    await self._store.note_shards(run_id, _to_note(run))

    async def _read(self, run_ids: Sequence[str]) -> list[RunRecord | None]:
        roots = await self._store.roots(run_ids)
        return [None if root is None else RunRecord.FromString(root.run) for root in roots]


def _num_shards(run: RunRecord) -> int:
    return run.policy.token_shards if run.policy.token_shards > 1 else 0


def _to_note(run: RunRecord | None) -> int:
    """What the roll says of a run: nothing once it is closed or gone."""
    return 0 if run is None or run.is_closed else _num_shards(run)
