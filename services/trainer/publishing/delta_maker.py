"""Makes the deltas between published versions, after those are offered, one at a time and in order.

- A receiver hears when a delta is expected, so that one on a slow link can wait for it instead of fetching everything.
- A delta is an offer to save bytes, and nothing waits for it: one that fails is logged and counted, one that comes so
  late that its version is no longer kept is deleted.
- A version gets none if the one before it is of another history, or if two are under way already: comparing takes
  longer than a step then, and receivers fetch the full content.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from enum import StrEnum

import structlog
from prometheus_client import Counter

from penstock.deltas.content import write_delta
from penstock.process.tasks import uninterrupted
from penstock.v1 import weights_pb2
from services.trainer.publishing.deltas import ExpectedDelta, Published
from services.trainer.publishing.version_store import WeightStore

MAX_DELTA_SHARE = 0.9
"""Share of the full content's bytes; a larger delta would take more time to make and apply than its transfer saves."""
MAX_UNDER_WAY = 2
FIRST_BYTES_PER_SECOND = 500e6
"""Bytes of full content compared per second, before the first delta was timed."""

DELTAS = Counter("penstock_trainer_deltas", "Deltas between published versions, by what became of them", ["outcome"])
_log = structlog.get_logger()


class Outcome(StrEnum):
    """What became of a delta."""

    OFFERED = "offered"
    NOT_WORTHWHILE = "not_worthwhile"
    LATE = "late"
    """Its version is no longer kept, or the run ended first."""
    SKIPPED = "skipped"
    """Those before it were still being made."""
    FAILED = "failed"


class DeltaMaker:
    """The deltas of one run's publisher.

    Args:
        store: Offers them.
        describe: Fills in the size, chunks and address of a manifest's content.
    """

    def __init__(self, *, store: WeightStore, describe: Callable[[Published], None]) -> None:
        self._store = store
        self._describe = describe
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self._bytes_per_second = FIRST_BYTES_PER_SECOND
        self._share = 0.0
        """Of the last delta in the bytes of its version; 0 before the first."""

    def begin(self, base: Published, version: Published) -> None:
        """Make the delta between two versions that were offered one after the other, in the background."""
        old, new = base.manifest, version.manifest
        if old.history != new.history or old.policy_version >= new.policy_version:
            return
        if len(self._under_way) >= MAX_UNDER_WAY:
            DELTAS.labels(Outcome.SKIPPED).inc()
            return
        delta = ExpectedDelta(
            base=old,
            digest=new.digest,
            ready_s=time.monotonic() + (1 + len(self._under_way)) * new.size_bytes / self._bytes_per_second,
            size_bytes=int(self._share * new.size_bytes),
        )
        self._store.expect_delta(delta)
        task = asyncio.create_task(self._make(base, version))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def finish(self) -> None:
        """Wait until none is being made."""
        if self._under_way:
            await uninterrupted(asyncio.gather(*self._under_way))

    async def close(self) -> None:
        """Give up those that are being made, and make no more."""
        self._closing.set()
        await self.finish()

    async def _make(self, base: Published, version: Published) -> None:
        delta, outcome = None, Outcome.NOT_WORTHWHILE
        try:
            async with self._turn:
                delta = await self._timed(base, version)
        except FileNotFoundError:
            # So late that one of the two was deleted.
            outcome = Outcome.LATE
        except Exception as error:  # Whatever it is: the version is offered, and is fetched whole.
            outcome = Outcome.FAILED
            _log.warning("a version has no delta", policy_version=version.manifest.policy_version, error=str(error))
        is_kept = self._store.end_delta(version, delta)
        if not is_kept or self._closing.is_set():
            outcome = Outcome.LATE
        elif delta is not None:
            outcome = Outcome.OFFERED
        DELTAS.labels(outcome).inc()

    async def _timed(self, base: Published, version: Published) -> Published | None:
        num_bytes, begun_s = version.manifest.size_bytes, time.monotonic()
        delta = await asyncio.to_thread(self._written, base, version)
        if not self._closing.is_set():
            self._bytes_per_second = num_bytes / max(time.monotonic() - begun_s, 1e-6)
            self._share = MAX_DELTA_SHARE if delta is None else delta.manifest.size_bytes / num_bytes
        return delta

    def _written(self, base: Published, version: Published) -> Published | None:
        """None if it is not worthwhile, or not wanted any more."""
        manifest = weights_pb2.WeightsManifest()
        manifest.CopyFrom(version.manifest)
        manifest.kind = weights_pb2.WEIGHTS_KIND_DELTA
        manifest.encoding = weights_pb2.WEIGHTS_ENCODING_CHANGED_BLOCKS
        manifest.base_version, manifest.base_digest = base.manifest.policy_version, base.manifest.digest
        delta = Published(manifest=manifest, path=version.path.with_suffix(".delta"))
        size_bytes = write_delta(
            base.path,
            version.path,
            delta.path,
            base_digest=base.manifest.digest,
            digest=manifest.digest,
            max_bytes=int(manifest.size_bytes * MAX_DELTA_SHARE),
            is_wanted=lambda: not self._closing.is_set(),
        )
        if size_bytes is None:
            return None
        self._describe(delta)
        return delta
