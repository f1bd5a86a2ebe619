"""Removes runs: deleted by an operator, or expired some time after they were closed.

Order: the run's record is marked (from then on it cannot be opened or written to, and its streams end), then its
records and payload are deleted in slices, then, for a deletion, the rest of its keys. Any broker process may safely
repeat each part, and each slice is deleted only while the run is still the marked one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from penstock.errors import RunConflictError, ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.operations import agent_sessions, drops
from services.broker.records.store import ConflictError, Delta, Root, Store
from services.broker.records_pb2 import RunRecord
from services.broker.runtime.run_replica import RunReplica
from services.broker.shards.shard_removal import remove_shards
from services.broker.state.run_state import RunState

DELETED, EXPIRED = "deleted", "expired"
CALL_S = 2.0
"""Longest time one call spends on slices before it asks to be repeated."""
WORKING_S = 60.0
"""An open run that took a step, or was opened, this recently is in use."""
MAX_ATTEMPTS = 50


async def delete(replica: RunReplica, *, is_forced: bool) -> broker_pb2.DeleteRunResponse:
    """Delete a run, or continue deleting it; see DeleteRun.

    Raises:
        RunConflictError: it is open and in use, and the caller does not force it.
        ServiceUnavailableError: the store is unavailable, or others kept changing the run.
    """
    store, until_s, num_keys = replica.store, time.monotonic() + CALL_S, 0
    existed = replica.run_id in await store.run_ids()
    for _ in range(MAX_ATTEMPTS):
        [root] = await store.roots([replica.run_id])
        existed = existed or root is not None
        try:
            if root is None:
                await store.delete(replica.run_id, None)
                replica.forget()
                return broker_pb2.DeleteRunResponse(existed=existed, num_keys=num_keys, is_complete=True)
            run = RunRecord.FromString(root.run)
            if run.payload_gone != DELETED:
                if not is_forced:
                    await _check_idle(replica, run)
                await mark(store, root, is_closed=True, payload_gone=DELETED)
                continue
            async for num_cut in purge(store, run, root):
                num_keys += num_cut
                if time.monotonic() > until_s:
                    return broker_pb2.DeleteRunResponse(existed=True, num_keys=num_keys)
            await store.delete(replica.run_id, root.mark)
        except ConflictError:
            continue
    raise ServiceUnavailableError(f"run {replica.run_id!r}: others kept changing it while it was being deleted")


async def expire(replica: RunReplica, root: Root) -> None:
    """Mark a closed run for payload deletion; samples still in flight are dropped with reason `expired` first.

    Raises ConflictError if the run was changed meanwhile.
    """
    run = RunRecord.FromString(root.run)
    has_samples = run.submitted != run.trained + sum(run.dropped.values())
    if has_samples or run.sessions_opened != run.sessions_put + sum(run.sessions_dropped.values()):
        await replica.transact(_drop_all)
        [fresh] = await replica.store.roots([replica.run_id])
        if fresh is None or not RunRecord.FromString(fresh.run).is_closed:
            return
        root = fresh
    await mark(replica.store, root, is_closed=True, payload_gone=EXPIRED)


def _drop_all(state: RunState) -> None:
    """Drop what a closed run still has in flight."""
    if state.run.is_closed:
        drops.drop_all(state, EXPIRED)
        agent_sessions.drop_all(state, EXPIRED)


async def purge(store: Store, run: RunRecord, root: Root) -> AsyncIterator[int]:
    """Delete the records and payload of a marked run and its token shards; see `Store.purge`."""
    async for num_cut in remove_shards(store, run.run_id, range(1, run.policy.token_shards + 1)):
        yield num_cut
    # Last: its record says how many shards there are to look for.
    async for num_cut in store.purge(run.run_id, root.mark):
        yield num_cut


async def mark(store: Store, root: Root, **changes: float | str) -> None:
    """Change fields of a run's record alone, without loading its groups. Raises ConflictError."""
    run = RunRecord.FromString(root.run)
    for field, value in changes.items():
        setattr(run, field, value)
    await store.commit(run.run_id, root.mark, Delta(run=run.SerializeToString(deterministic=True)))


async def _check_idle(replica: RunReplica, run: RunRecord) -> None:
    if run.is_closed:
        return
    who = ""
    await replica.learn_time()
    generators, workers = await replica.peers.views(None)
    idle_s = replica.clock.now_s() - max(run.open_s, run.version_s, run.owner_s)
    if generators:
        who = f"generator {generators[0].hello.generator_id}"
    elif workers:
        who = f"reward worker {workers[0]}"
    elif replica.num_listeners:
        who = "a stream of it is open"
    elif idle_s < WORKING_S:
        who = f"it was opened or took a step {max(0.0, idle_s):.0f} s ago"
    if who:
        raise RunConflictError(
            f"run {run.run_id!r} is open and being worked on ({who}); stop it first, or force it "
            f"(penstock runs delete {run.run_id} --force)",
            run_id=run.run_id,
        )
