"""Two real trainers of one run, on one Redis: the one that stalled wakes up after the other has taken over."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from penstock.network import rpc
from penstock.v1 import broker_pb2, trainer_pb2, trainer_pb2_grpc
from tests.helpers.brokers.broker import Generator, RunningBroker, Worker, eventually, result, serving
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.ports import free_address, free_port
from tests.helpers.stores.stores import RedisServers, opened_store
from tests.helpers.trainers.training import run_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN_ID, GROUP_SIZE, NUM_STEPS = "r", 4, 6
START_TIMEOUT_S, END_TIMEOUT_S = 120.0, 90.0


@dataclass(frozen=True, slots=True)
class TrainerProcess:
    """A `penstock serve trainer`."""

    process: subprocess.Popen[bytes]
    stub: trainer_pb2_grpc.TrainerServiceAsyncStub

    async def start(self, document: dict, *, resume: bool) -> None:
        request = trainer_pb2.StartRunRequest(run_id=RUN_ID, config_json=json.dumps(document), resume=resume)
        await self.stub.StartRun(request, timeout=20)

    async def end(self) -> trainer_pb2.RunFinished:
        """How its run ended."""
        request = trainer_pb2.WatchRunRequest(run_id=RUN_ID)
        async for event in self.stub.WatchRun(request, timeout=END_TIMEOUT_S):
            if event.WhichOneof("event") == "finished":
                return event.finished
        raise AssertionError("the run's events end without its end")


@pytest.fixture
async def trainers(tmp_path: Path) -> AsyncIterator[list[TrainerProcess]]:
    """Two trainers that serve."""
    found, channels = [], []
    try:
        for name in ("first", "second"):
            address = free_address()
            command = [sys.executable, "-m", "console", "serve", "trainer", "--listen", address]
            command += [f"weights_listen=127.0.0.1:{free_port()}", f"allowed_roots=[{tmp_path.parent}]"]
            with (tmp_path / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 -- returns at once
            channels.append(grpc.aio.insecure_channel(address))
            found.append(TrainerProcess(process, trainer_pb2_grpc.TrainerServiceStub(channels[-1])))
            assert await rpc.wait_until_serving(address, timeout_s=START_TIMEOUT_S)
        yield found
    finally:
        for trainer in found:
            trainer.process.kill()
            trainer.process.wait(timeout=10)
        for channel in channels:
            await channel.close()


@dataclass(slots=True)
class Hands:
    """A generator and a reward worker that make one group at a time."""

    broker: RunningBroker
    generator: Generator
    worker: Worker

    async def view(self) -> broker_pb2.GetRunResponse:
        response: broker_pb2.GetRunResponse = await self.broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN_ID))
        return response

    async def make_group(self) -> None:
        self.generator.beat(credits=GROUP_SIZE, version=(await self.view()).policy_version)
        await self.generator.finish(await self.generator.leases(GROUP_SIZE))
        leases = await self.worker.leases(GROUP_SIZE)
        await self.worker.report(*(result(lease, float(place % 2)) for place, lease in enumerate(leases)))

    async def make_step(self, num_groups: int = 2) -> None:
        """Make the groups of a step, and wait until it is acknowledged."""
        version = (await self.view()).policy_version
        for _ in range(num_groups):
            await self.make_group()
        await self.reach(version + 1)

    async def reach(self, version: int) -> None:
        async def is_there() -> bool:
            return (await self.view()).policy_version >= version

        await eventually(is_there)

    async def owned_by(self, epoch: int) -> str:
        """Who owns the run, once its epoch is that."""

        async def is_owned() -> bool:
            return await _exists(self.broker) and (await self.view()).owner.epoch == epoch

        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    await eventually(is_owned)
                    return (await self.view()).owner.owner_id
                except TimeoutError:
                    continue


async def _exists(broker: RunningBroker) -> bool:
    response: broker_pb2.ListRunsResponse = await broker.call("ListRuns", broker_pb2.ListRunsRequest())
    return RUN_ID in response.run_ids


def _document(folder: Path, model: Path, broker: str) -> dict:
    folder.mkdir()
    document = run_document(
        folder, model, broker, num_steps=NUM_STEPS, checkpoint_every_steps=1, num_eval_prompts=0, keep_checkpoints=9
    )
    return document | {"policy": {"dispatch": "fifo"}}


async def test_a_trainer_that_wakes_up_after_another_took_over_ends_and_changes_nothing(
    tmp_path: Path, servers: RedisServers, trainers: list[TrainerProcess]
) -> None:
    address, model = free_address(), make_tiny_model(tmp_path / "model")
    first, second = trainers
    here, there = _document(tmp_path / "here", model, address), _document(tmp_path / "there", model, address)
    folder = tmp_path / "here" / "runs" / RUN_ID
    async with opened_store("redis", servers) as store, serving(store, listen=address) as broker:
        await first.start(here, resume=False)
        probe = Hands(broker, None, None)  # type: ignore[arg-type]
        first_owner = await probe.owned_by(1)
        hands = Hands(
            broker, Generator.connect(broker.channel, run_id=RUN_ID), Worker.connect(broker.channel, run_id=RUN_ID)
        )
        for _ in range(2):
            await hands.make_step()
        await hands.make_group()

        async def is_holding() -> bool:
            held = (await hands.view()).audit.in_flight_by_state["delivered"] == GROUP_SIZE
            return held and (folder / "checkpoints" / "step_2" / "COMPLETE").exists()

        await eventually(is_holding)
        first.process.send_signal(signal.SIGSTOP)
        shutil.copytree(tmp_path / "here" / "runs", tmp_path / "there" / "runs")
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

        await second.start(there, resume=True)
        second_owner = await hands.owned_by(2)
        assert second_owner != first_owner
        # The group that the first one held makes up the step.
        await hands.make_step(num_groups=1)
        await hands.make_step()
        first.process.send_signal(signal.SIGCONT)
        end = await first.end()
        assert end.outcome == trainer_pb2.RUN_OUTCOME_FAILED
        assert f"fenced: trainer {second_owner!r} took run 'r' over at " in end.message
        assert end.message.count("\n") == 0
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        view = await hands.view()
        assert (view.policy_version, view.owner.owner_id, view.is_closed) == (4, second_owner, False)

        await hands.make_step()
        await hands.make_step()
        assert (await second.end()).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED
        books = await broker.audit(RUN_ID)
        assert (books.trained, books.submitted, books.policy_version) == (
            NUM_STEPS * 2 * GROUP_SIZE,
            NUM_STEPS * 2 * GROUP_SIZE,
            NUM_STEPS,
        )
