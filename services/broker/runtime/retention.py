"""Deletes the payload of closed runs some time after they close, and finishes interrupted deletions.

Every broker process checks; marks and slices ensure that each deletion happens once. Time is the store's own.
"""

from __future__ import annotations

import asyncio

import structlog

from penstock.errors import PenstockError
from services.broker.records.store import ConflictError, Root
from services.broker.records_pb2 import RunRecord
from services.broker.runtime import removal
from services.broker.runtime.run_registry import RunRegistry

CHECK_EVERY_S = 600.0
"""Also the delay of the first check after a broker's start: a trainer started with it may reopen its run."""
MIN_CHECK_EVERY_S = 10.0
"""The same where closed runs are kept for a shorter time."""
ROOTS_AT_ONCE = 100

_log = structlog.get_logger()


class Retention:
    """See the module."""

    def __init__(self, run_registry: RunRegistry, *, keep_s: float | None) -> None:
        """`keep_s`: how long the payload of a closed run is kept, seconds; None keeps it until the run is deleted."""
        self._run_registry = run_registry
        self._keep_s = keep_s
        self.check_every_s = CHECK_EVERY_S if keep_s is None else min(CHECK_EVERY_S, max(MIN_CHECK_EVERY_S, keep_s))

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            await asyncio.sleep(self.check_every_s)
            try:
                await self.check()
            except PenstockError as error:
                _log.warning("closed runs not looked at", error=str(error))

    async def check(self) -> None:
        """Check every run once. Raises ServiceUnavailableError."""
        run_ids = await self._run_registry.store.run_ids()
        for start in range(0, len(run_ids), ROOTS_AT_ONCE):
            some = run_ids[start : start + ROOTS_AT_ONCE]
            for run_id, root in zip(some, await self._run_registry.store.roots(some), strict=True):
                try:
                    if root is not None:
                        await self._look_at(run_id, root)
                except ConflictError:
                    _log.info("a closed run changed while it was looked at", run_id=run_id)

    async def _look_at(self, run_id: str, root: Root) -> None:
        store, replica = self._run_registry.store, self._run_registry.replica(run_id)
        run = RunRecord.FromString(root.run)
        if run.payload_gone == removal.DELETED:
            while not (await removal.delete(replica, is_forced=True)).is_complete:
                pass
            _log.info("a deletion left half done was finished", run_id=run_id)
        elif run.payload_gone:
            if root.num_records or run.policy.token_shards > 1:
                num_keys = sum([num_cut async for num_cut in removal.purge(store, run, root)])
                _log.info("payload of a closed run expired", run_id=run_id, num_keys=num_keys)
        elif run.is_closed and self._keep_s is not None:
            now_s = await store.now_s(run_id)
            if not run.close_s:
                # Closed before closing times were recorded: its retention period starts now.
                await removal.mark(store, root, close_s=now_s)
            elif now_s - run.close_s >= self._keep_s:
                await removal.expire(replica, root)
                [marked] = await store.roots([run_id])
                if marked is not None and RunRecord.FromString(marked.run).payload_gone:
                    await self._look_at(run_id, marked)
