"""Lists runs, each summarised from its record alone, without its groups."""

from __future__ import annotations

from collections.abc import Callable

from penstock.v1 import broker_pb2
from penstock.wire.timestamps import timestamp
from services.broker.records.store import Store
from services.broker.records_pb2 import RunRecord

MAX_RUNS_LISTED = 1_000


async def list_runs(store: Store, is_shown: Callable[[str], bool]) -> broker_pb2.ListRunsResponse:
    """The newest runs of the store, oldest first, without those that are not to be shown."""
    run_ids = [run_id for run_id in (await store.run_ids())[-MAX_RUNS_LISTED:] if is_shown(run_id)]
    roots = [root for root in await store.roots(run_ids) if root is not None]
    runs = [_summary(RunRecord.FromString(root.run), root.num_records) for root in roots]
    return broker_pb2.ListRunsResponse(run_ids=run_ids, runs=runs)


def _summary(run: RunRecord, num_records: int) -> broker_pb2.RunSummary:
    return broker_pb2.RunSummary(
        run_id=run.run_id,
        instance_id=run.owner.instance_id,
        policy_version=run.policy_version,
        is_closed=run.is_closed,
        payload_gone=run.payload_gone,
        open_time=timestamp(run.open_s),
        active_time=timestamp(max(run.open_s, run.version_s, run.owner_s, run.close_s)),
        num_records=num_records,
        submitted=run.submitted,
        trained=run.trained,
        dropped=sum(run.dropped.values()),
    )
