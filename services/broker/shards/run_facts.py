"""What token shards know of their runs, read from the runs' records: once for all shards of a run in a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import RunClosedError, UnknownRunError
from penstock.wire.routes import RoutingShape
from services.broker.records.store import Store
from services.broker.records_pb2 import RunRecord
from services.broker.rules.limits import Limits

FACTS_LIFE_S = 1.0
"""How long shards go on by what was last read of their run."""
MAX_RUNS = 1_024
"""Runs whose facts are remembered."""
MIN_PROGRESS_EVERY_S, MAX_PROGRESS_EVERY_S = 0.25, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run as of one reading."""

    open_s: float
    """When it was opened; distinguishes runs of one id."""
    is_closed: bool
    is_gone: bool
    """Whether its records are deleted, or being deleted."""
    policy_version: int
    max_completion_tokens: int
    routing: RoutingShape | None
    has_environment: bool
    """Whether last chunks may bring scores."""
    progress_every_s: float
    """How often it has to hear how far samples are."""
    read_s: float
    """When it was read, by the process's own clock."""


class FactsOfRuns:
    """The facts of the runs whose shards a process works on.

    Args:
        store: Where the runs are.
        monotonic_s: The process's clock for durations.
    """

    def __init__(self, store: Store, monotonic_s: Callable[[], float]) -> None:
        self._store, self._monotonic_s = store, monotonic_s
        self._known: dict[str, RunFacts] = {}
        self._readings: dict[str, asyncio.Task[RunFacts]] = {}

    async def of(self, run_id: str, *, version: int = 0, needs_open: bool = False) -> RunFacts:
        """The facts of a run, read again when they are old, or of a version before this one.

        With `needs_open` so they are when the run is said to be closed, too: it may have been opened again. Raises
        UnknownRunError if there is no run, ServiceUnavailableError.
        """
        called_s = self._monotonic_s()

        def is_new_enough(facts: RunFacts) -> bool:
            is_past = called_s - facts.read_s > FACTS_LIFE_S
            return not is_past and not (needs_open and facts.is_closed) and version <= facts.policy_version

        known = self._known.get(run_id)
        if known is not None and is_new_enough(known):
            return known
        begun = self._readings.get(run_id)
        if begun is not None:
            # It began before this call, and may not show what the caller knows.
            with suppress(UnknownRunError):
                known = await asyncio.shield(begun)
                if is_new_enough(known):
                    return known
        return await self._read(run_id)

    async def read_now(self, run_id: str) -> RunFacts:
        """The facts as of now, or later. Raises like `of`."""
        begun = self._readings.get(run_id)
        if begun is not None:
            await asyncio.wait([begun])
        return await self._read(run_id)

    async def _read(self, run_id: str) -> RunFacts:
        """What a reading finds that this call begins, or another one has begun since `of` was called."""
        reading = self._readings.get(run_id)
        if reading is None:
            reading = self._readings[run_id] = asyncio.create_task(self._reading(run_id))
            reading.add_done_callback(_retrieve)
        return await asyncio.shield(reading)

    async def _reading(self, run_id: str) -> RunFacts:
        read_s = self._monotonic_s()
        try:
            self._known.pop(run_id, None)
            [root] = await self._store.roots([run_id])
        finally:
            del self._readings[run_id]
        if root is None:
            raise UnknownRunError(f"run {run_id!r} is not open", run_id=run_id)
        if len(self._known) >= MAX_RUNS:
            self._known.clear()
        facts = self._known[run_id] = _facts(RunRecord.FromString(root.run), read_s)
        return facts


def _retrieve(task: asyncio.Task[RunFacts]) -> None:
    """Retrieve a task's error, which no caller may wait for any more."""
    if not task.cancelled():
        task.exception()


def _facts(run: RunRecord, read_s: float) -> RunFacts:
    limits = Limits.from_proto(run.limits)
    return RunFacts(
        open_s=run.open_s,
        is_closed=run.is_closed,
        is_gone=bool(run.payload_gone),
        policy_version=run.policy_version,
        max_completion_tokens=limits.max_completion_tokens,
        routing=limits.routing,
        has_environment=run.policy.has_environment,
        progress_every_s=_progress_every_s(limits),
        read_s=read_s,
    )


def _progress_every_s(limits: Limits) -> float:
    """A fraction of the shortest time after which a lease without a token is left to expire."""
    silence_s = limits.token_silence("", None).value_s
    return max(MIN_PROGRESS_EVERY_S, min(MAX_PROGRESS_EVERY_S, silence_s / 4))


def check_open(facts: RunFacts, run_id: str) -> None:
    """Raise RunClosedError if the run is closed."""
    if facts.is_closed:
        raise RunClosedError(f"run {run_id!r} is closed", run_id=run_id)
