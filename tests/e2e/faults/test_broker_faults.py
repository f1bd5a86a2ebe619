"""Brokers, Redis, generators, workers, a producer and the trainer killed, paused and cut off at random, for minutes.

PENSTOCK_FAULT_S sets for how long (default 75 s of faults), PENSTOCK_FAULT_SEED the schedule (default random, printed),
PENSTOCK_FAULT_FSYNC Redis' appendfsync (default always: what was answered is not lost; with everysec a kill may lose
the last second, and the trainer's ledger brings the broker up to date).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from penstock.clients.broker import BrokerClient
from penstock.network.rpc import open_channel
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from services.broker.state.run_state import FORMAT
from tests.helpers.faults import workload
from tests.helpers.faults.schedule import Fault, make_schedule
from tests.helpers.faults.stage import Stage
from tests.helpers.faults.trainer import Checkpoint
from tests.helpers.stores.redis_groups import SentinelGroup

FAULT_S = float(os.environ.get("PENSTOCK_FAULT_S", "75"))
SEED = int(os.environ.get("PENSTOCK_FAULT_SEED", random.randrange(1 << 30)))
FSYNC = os.environ.get("PENSTOCK_FAULT_FSYNC", "always")
SETTLE_S = 120.0
"""Time to take the last steps once nothing breaks any more."""
NUM_LAST_STEPS = 5

pytestmark = [pytest.mark.e2e, pytest.mark.flaky(reruns=0), pytest.mark.timeout(int(FAULT_S + 2 * SETTLE_S))]


def test_the_same_seed_gives_the_same_schedule() -> None:
    one, two = (make_schedule(7, 60.0, processes=("a", "b"), links=("l",)) for _ in range(2))
    assert one == two
    assert one != make_schedule(8, 60.0, processes=("a", "b"), links=("l",))
    assert {(fault.kind, fault.target) for fault in one} >= {("kill", "a"), ("pause", "b"), ("cut", "l")}


async def test_nothing_is_lost_and_nothing_is_trained_twice_whatever_breaks(tmp_path: Path) -> None:
    print(f"seed {SEED}: repeat with PENSTOCK_FAULT_SEED={SEED} PENSTOCK_FAULT_S={FAULT_S:g}")
    async with Stage(tmp_path, seed=SEED, fsync=FSYNC) as stage:
        await _reaches(stage, tmp_path, 3)
        faults = make_schedule(SEED, FAULT_S, processes=list(stage.processes), links=list(stage.links))
        await stage.play(faults)
        done = Checkpoint.read(tmp_path / "checkpoint.json").version
        await _reaches(stage, tmp_path, done + NUM_LAST_STEPS)
        (tmp_path / "stop").touch()
        await _ends(stage)
        num_rewinds = await _check(stage, tmp_path)
        starts = {name: process.num_starts for name, process in stage.processes.items()}
    said = Counter(str(note["kind"]) for note in workload.notes(tmp_path))
    print(f"{len(faults)} faults; starts {starts}; {num_rewinds} rewinds; notes {dict(said)}")
    assert said["continued"] > 0, "no partial rollout was continued: the faults missed the point"
    assert said["resent"] > 0, "nothing was sent twice: the faults missed the point"


async def test_a_run_goes_on_when_one_of_two_brokers_is_gone_for_good(tmp_path: Path) -> None:
    async with Stage(tmp_path, seed=1, num_generators=2, num_workers=1) as stage:
        await _reaches(stage, tmp_path, 3)
        # The first of every client's list, so the one in use.
        stage.processes.pop("broker-0").kill()
        stage.direct_brokers.pop(0)
        await _reaches(stage, tmp_path, Checkpoint.read(tmp_path / "checkpoint.json").version + NUM_LAST_STEPS)
        (tmp_path / "stop").touch()
        await _ends(stage)
        assert await _check(stage, tmp_path) == 0


async def test_a_run_goes_on_while_its_brokers_are_upgraded_one_by_one(tmp_path: Path) -> None:
    async with Stage(tmp_path, seed=1, num_generators=2, num_workers=1) as stage:
        await _reaches(stage, tmp_path, 3)
        await stage.upgrade_broker(1)
        # Every client's way to the older one breaks for a moment: the newer one converts the run's records.
        await stage.play([Fault(at_s=0.0, kind="cut", target="broker-0-link", lasts_s=1.0)])
        async with asyncio.timeout(SETTLE_S):
            while not (said := await _refusal(stage.direct_brokers[0])):  # noqa: ASYNC110 -- a stored record is no event
                await asyncio.sleep(0.05)
        assert said.startswith("UNAVAILABLE")
        assert f"written by a newer Penstock (format {FORMAT + 1}, this broker reads {FORMAT})" in said
        await _reaches(stage, tmp_path, Checkpoint.read(tmp_path / "checkpoint.json").version + NUM_LAST_STEPS)
        await stage.upgrade_broker(0)
        await _reaches(stage, tmp_path, Checkpoint.read(tmp_path / "checkpoint.json").version + NUM_LAST_STEPS)
        (tmp_path / "stop").touch()
        await _ends(stage)
        assert await _check(stage, tmp_path) == 0


async def _refusal(address: str) -> str:
    """Why this broker, and no other, does not answer for the run; empty if it does."""
    async with open_channel(address) as channel:
        try:
            request = broker_pb2.AuditRunRequest(run_id=workload.RUN_ID)
            await broker_pb2_grpc.BrokerServiceStub(channel).AuditRun(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return ""


async def test_a_run_goes_on_through_a_sentinel_fail_over(tmp_path: Path) -> None:
    group = SentinelGroup(tmp_path / "redis", num_replicas=2, num_sentinels=3)
    group.start()
    try:
        settings = (f"redis_url={group.url}", "redis_wait_replicas=1")
        async with Stage(tmp_path, seed=1, broker_settings=settings, num_generators=2, num_workers=1) as stage:
            await _reaches(stage, tmp_path, 3)
            master = group.master()
            master.kill()
            await _reaches(stage, tmp_path, Checkpoint.read(tmp_path / "checkpoint.json").version + NUM_LAST_STEPS)
            assert group.master() is not master
            (tmp_path / "stop").touch()
            await _ends(stage)
            assert await _check(stage, tmp_path) == 0
    finally:
        group.stop()


async def _reaches(stage: Stage, folder: Path, version: int) -> None:
    async with asyncio.timeout(SETTLE_S):
        while Checkpoint.read(folder / "checkpoint.json").version < version:
            stage.check_running()
            await asyncio.sleep(0.05)


async def _ends(stage: Stage) -> None:
    async with asyncio.timeout(SETTLE_S):
        while (status := stage.processes["trainer"].status) is None:  # noqa: ASYNC110 -- a process is no event
            await asyncio.sleep(0.05)
    assert status == 0


async def _check(stage: Stage, folder: Path) -> int:
    """The trainer's own ledger against the broker's books, asked of every broker; returns how often it was rewound."""
    assert [note for note in workload.notes(folder) if note["kind"] == "violation"] == []
    checkpoint = Checkpoint.read(folder / "checkpoint.json")
    trained = Counter(name for step in checkpoint.steps for name in step)
    num_put = sum(name.startswith("producer") for name in trained)
    print(f"{checkpoint.version} steps, {len(trained)} groups, {num_put} of them put by the producer")
    assert 0 < num_put < len(trained)
    assert max(trained.values()) == 1
    for address in stage.direct_brokers:
        async with BrokerClient(address) as client:
            books = await client.audit(workload.RUN_ID)
        assert books.balanced, books
        assert books.trained == workload.GROUP_SIZE * len(trained)
        assert books.submitted == books.trained + sum(books.dropped.values()) + books.in_flight
        assert max(books.trained_by_staleness, default=0) <= workload.MAX_STALENESS
        exported = await _exported(address)
        assert {version: sorted(names) for version, names in exported.items()} == {
            version: sorted(names) for version, names in enumerate(checkpoint.steps, 1)
        }
    return max(int(str(note["history"])) for note in workload.notes(folder) if note["kind"] == "opened")


async def _exported(address: str) -> dict[int, list[str]]:
    """The groups of every step as the broker has them, their tokens checked."""
    steps: dict[int, list[str]] = {}
    async with open_channel(address) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        request = broker_pb2.ExportTrajectoriesRequest(run_id=workload.RUN_ID)
        async for response in stub.ExportTrajectories(request, timeout=60):
            group: types_pb2.TrajectoryGroup = response.group
            if group.prompt.group_id:
                assert workload.problems_of(group, trainer_version=response.policy_version - 1) == []
                steps.setdefault(response.policy_version, []).append(group.prompt.group_id)
    return steps
