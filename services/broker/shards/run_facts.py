"""What a token shard knows of its run, read from the run's record."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import RunClosedError, UnknownRunError
from services.broker.records.store import Store
from services.broker.records_pb2 import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run as of one reading."""

    open_s: float
    """When it was opened, by which runs of one id are told apart."""
    is_closed: bool
    policy_version: int
    max_completion_tokens: int
    num_shards: int
    """0 if its tokens are beside its own records."""
    read_s: float
    """When it was read, by the process's own clock."""


async def read_facts(store: Store, run_id: str, read_s: float) -> RunFacts:
    """Read them. Raises UnknownRunError if there is no run, or its records are deleted or being deleted."""
    [root] = await store.roots([run_id])
    run = RunRecord.FromString(root.run) if root is not None else None
    if run is None or run.payload_gone:
        raise UnknownRunError(f"run {run_id!r} is not open", run_id=run_id)
    num_shards = run.policy.token_shards
    return RunFacts(
        open_s=run.open_s,
        is_closed=run.is_closed,
        policy_version=run.policy_version,
        max_completion_tokens=run.limits.max_completion_tokens,
        num_shards=num_shards if num_shards > 1 else 0,
        read_s=read_s,
    )


def check_open(facts: RunFacts, run_id: str) -> None:
    """Raise RunClosedError if the run is closed."""
    if facts.is_closed:
        raise RunClosedError(f"run {run_id!r} is closed", run_id=run_id)
