"""What a token shard knows of its run, read from the run's record."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import RunClosedError, UnknownRunError
from services.broker.records.store import Store
from services.broker.records_pb2 import RunRecord
from services.broker.rules.limits import Limits

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
    progress_every_s: float
    """How often it has to hear how far samples are."""
    read_s: float
    """When it was read, by the process's own clock."""


async def read_facts(store: Store, run_id: str, read_s: float) -> RunFacts:
    """Read them. Raises UnknownRunError if there is no run."""
    [root] = await store.roots([run_id])
    if root is None:
        raise UnknownRunError(f"run {run_id!r} is not open", run_id=run_id)
    run = RunRecord.FromString(root.run)
    return RunFacts(
        open_s=run.open_s,
        is_closed=run.is_closed,
        is_gone=bool(run.payload_gone),
        policy_version=run.policy_version,
        max_completion_tokens=run.limits.max_completion_tokens,
        progress_every_s=_progress_every_s(Limits.from_proto(run.limits)),
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
