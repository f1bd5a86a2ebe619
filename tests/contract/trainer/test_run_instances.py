"""A run is itself: real trainers against a real broker whose store knows the run's id already."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.v1 import broker_pb2, trainer_pb2
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RunningBroker, serving
from tests.helpers.ports import free_address
from tests.helpers.trainers.training import RunningTrainer, run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = [pytest.mark.usefixtures("one_thread")]


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs are made."""

    broker: RunningBroker
    address: str
    model: Path

    def document(self, folder: Path) -> dict:
        folder.mkdir(exist_ok=True)
        return run_document(folder, self.model, self.address, num_eval_prompts=0)

    async def owner(self) -> broker_pb2.RunOwner:
        response = await self.broker.call("GetRun", broker_pb2.GetRunRequest(run_id="r"))
        owner: broker_pb2.RunOwner = response.owner
        return owner


@pytest.fixture
async def place(model: Path) -> AsyncIterator[Place]:
    address = free_address()
    async with serving(MemoryStore(), listen=address) as broker:
        yield Place(broker, address, model)


async def _opened(trainer: RunningTrainer) -> None:
    """Waits until the run is open at the broker: weights are published after that."""
    await until(lambda: bool(trainer.store._kept), timeout_s=60)


async def _begun_and_stopped(place: Place, folder: Path, *, resume: bool = False) -> broker_pb2.RunOwner:
    """A run that trained nothing; its owner at the broker."""
    async with running_trainer() as trainer:
        await trainer.start(place.document(folder), resume=resume)
        await _opened(trainer)
        return await place.owner()


async def _end(place: Place, folder: Path, *, resume: bool) -> trainer_pb2.RunFinished:
    async with running_trainer() as trainer:
        await trainer.start(place.document(folder), resume=resume)
        return (await trainer.events())[-1].finished


async def test_a_fresh_run_under_a_used_id_is_refused_with_three_ways_on(place: Place, tmp_path: Path) -> None:
    first = await _begun_and_stopped(place, tmp_path / "one")
    before = await place.broker.audit("r")
    finished = await _end(place, tmp_path / "two", resume=False)
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    for words in ("'r' is another run", "penstock run --resume DIR", "another run id", "penstock runs delete r"):
        assert words in finished.message
    assert (await place.owner(), await place.broker.audit("r")) == (first, before)


async def test_a_resumed_run_refuses_a_store_that_holds_another_instance(place: Place, tmp_path: Path) -> None:
    other = broker_pb2.RunOwner(instance_id="of-another", owner_id="someone")
    mine = await _begun_and_stopped(place, tmp_path / "one")
    async with serving(MemoryStore(), listen=free_address()) as elsewhere:
        opened = await place.broker.call("GetRun", broker_pb2.GetRunRequest(run_id="r"))
        request = broker_pb2.OpenRunRequest(
            run_id="r", limits=opened.limits, policy=opened.policy, owner=other, takes_over=True
        )
        await elsewhere.call("OpenRun", request)
        finished = await _end(
            Place(elsewhere, f"127.0.0.1:{elsewhere.server.port}", place.model), tmp_path / "one", resume=True
        )
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "'of-another'" in finished.message
    assert mine.instance_id in finished.message


async def test_a_run_that_died_before_its_first_checkpoint_is_the_same_run_again(place: Place, tmp_path: Path) -> None:
    first = await _begun_and_stopped(place, tmp_path / "one")
    folder = tmp_path / "one" / "runs" / "r"
    shutil.rmtree(folder / "checkpoints")
    second = await _begun_and_stopped(place, tmp_path / "one", resume=True)
    assert second.instance_id == first.instance_id
    assert (first.epoch, second.epoch) == (1, 2)
    assert second.owner_id != first.owner_id
    assert json.loads((folder / "instance.json").read_text()) == {"instance_id": first.instance_id, "epoch": 2}


async def test_a_checkpoint_alone_says_which_run_it_is(place: Place, tmp_path: Path) -> None:
    first = await _begun_and_stopped(place, tmp_path / "one")
    (tmp_path / "one" / "runs" / "r" / "instance.json").unlink()
    second = await _begun_and_stopped(place, tmp_path / "one", resume=True)
    assert (second.instance_id, second.epoch) == (first.instance_id, 2)


async def test_weights_are_published_in_the_name_of_the_run_and_its_epoch(place: Place, tmp_path: Path) -> None:
    await _begun_and_stopped(place, tmp_path / "one")
    async with running_trainer() as trainer:
        await trainer.start(place.document(tmp_path / "one"), resume=True)
        await _opened(trainer)
        owner = await place.owner()
        manifest = trainer.store.newest("r").manifest
        assert (manifest.instance_id, manifest.epoch) == (owner.instance_id, 2)
