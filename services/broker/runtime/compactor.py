"""Replaces the chunks of samples by compact ones in the store, in the background, after they were read to be sent.

A delivery has the tokens in its hands, so that this costs no further read, and from then on they never change.

Promises: a delivery waits for it only while more than MAX_WAITING_BYTES wait; what fails is left as it was, which can
still be read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from penstock.errors import PenstockError
from penstock.v1 import types_pb2
from services.broker.operations import compaction
from services.broker.operations.compaction import CompactSample
from services.broker.records.store import Store
from services.broker.records.stored_sample import StoredSample, compacted, reference_element
from services.broker.records_pb2 import GroupRecord
from services.broker.shards import compacting
from services.broker.state.run_state import RunState

MAX_WAITING_BYTES = 16 * 1024 * 1024
COMMIT_BYTES = 512 * 1024
"""Written by one commit, which others of the run wait for; one sample may be larger."""
LINGER_S = 0.25
"""How long less than that waits for more, so that frequent small deliveries share a commit."""
MAX_SAMPLE_BYTES = 4 * 1024 * 1024
"""A larger sample keeps its chunks, which are large, too, and cost it little."""
THREAD_BYTES = 256 * 1024
"""A larger sample is compacted in a thread: its text alone takes 10 ms a MiB, in which the event loop goes on."""

Transact = Callable[[Callable[[RunState], int]], Awaitable[int]]
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Job:
    group_id: str
    index: int
    attempt: int
    stored: StoredSample
    token_shard: int

    @property
    def size_bytes(self) -> int:
        return _size_bytes(self.stored)


class Compactor:
    """See the module."""

    def __init__(self, run_id: str, store: Store) -> None:
        self._run_id, self._store = run_id, store
        self._jobs: deque[_Job] = deque()
        self._num_bytes = 0
        """Of jobs not finished."""
        self._has_room = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def offer(self, group: GroupRecord, stored: Mapping[int, StoredSample], transact: Transact) -> None:
        """Compact samples of a group, by index, that were read with their text; none of one that is compact.

        Waits while too much waits already.
        """
        if group.is_compact or group.purpose != types_pb2.PURPOSE_TRAIN:
            return
        while self._num_bytes > MAX_WAITING_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        for index, tokens in stored.items():
            if _size_bytes(tokens) <= MAX_SAMPLE_BYTES:
                self._jobs.append(_Job(group.group_id, index, group.samples[index].attempt, tokens, group.token_shard))
                self._num_bytes += _size_bytes(tokens)
        if self._jobs and self._worker is None:
            self._worker = asyncio.create_task(self._work(transact))

    async def settled(self) -> None:
        """Wait until nothing is left to do."""
        while self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self, transact: Transact) -> None:
        try:
            while self._jobs:
                if self._num_bytes < COMMIT_BYTES:
                    await asyncio.sleep(LINGER_S)
                await self._compact(self._next_jobs(), transact)
        finally:
            self._jobs.clear()
            self._num_bytes = 0
            self._has_room.set()
            self._worker = None

    def _next_jobs(self) -> list[_Job]:
        jobs = [self._jobs.popleft()]
        size_bytes = jobs[0].size_bytes
        while self._jobs and size_bytes + self._jobs[0].size_bytes <= COMMIT_BYTES:
            jobs.append(self._jobs.popleft())
            size_bytes += jobs[-1].size_bytes
        return jobs

    async def _compact(self, jobs: list[_Job], transact: Transact) -> None:
        try:
            samples = [await _encoded(job) for job in jobs]
            await transact(partial(compaction.replace_chunks, samples=await self._replaced(jobs, samples)))
        except PenstockError as error:
            _log.info("samples keep their chunks", run_id=self._run_id, num_samples=len(jobs), error=str(error))
        except Exception:  # whatever it is, other samples must not keep their chunks because of it
            _log.exception("samples keep their chunks", run_id=self._run_id, num_samples=len(jobs))
        self._num_bytes -= sum(job.size_bytes for job in jobs)
        self._has_room.set()

    async def _replaced(self, jobs: list[_Job], samples: list[CompactSample]) -> list[CompactSample]:
        """Replace the chunks that token shards have; returns what remains to be noted in the run."""
        by_shard: dict[int, list[CompactSample]] = {}
        for job, sample in zip(jobs, samples, strict=True):
            by_shard.setdefault(job.token_shard, []).append(sample)
        replaced = by_shard.pop(0, [])
        for shard, members in by_shard.items():
            flags = await compacting.compact(self._store, self._run_id, shard, members)
            replaced += [sample for sample, is_replaced in zip(members, flags, strict=True) if is_replaced]
        return replaced


async def _encoded(job: _Job) -> CompactSample:
    if job.size_bytes > THREAD_BYTES:
        payload = await asyncio.to_thread(compacted, job.stored)
    else:
        payload = compacted(job.stored)
        # Deliveries and chunks go first.
        await asyncio.sleep(0)
    reference = job.stored.reference_logprobs
    return CompactSample(
        sample=(job.group_id, job.index),
        attempt=job.attempt,
        payload=payload,
        reference=reference_element(reference) if reference else b"",
    )


def _size_bytes(stored: StoredSample) -> int:
    return 2 * len(stored.token_ids) + len(stored.text) + len(stored.routes)
