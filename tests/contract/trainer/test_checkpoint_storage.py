"""Checkpoints in object storage: copied there, resumed from there, and what happens when the storage refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.storage.addresses import Address, below, checked_address
from penstock.storage.fetched import forget_copies
from penstock.storage.manifest import MANIFEST_NAME, read_manifest
from penstock.storage.storage import Storage, StorageError
from penstock.v1 import trainer_pb2
from services.trainer.checkpoints.checkpoint_storage import CheckpointStorage
from services.trainer.folders.allowed_roots import Roots
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.serving import serving
from tests.helpers.stores.object_storage import put_folder, s3_server
from tests.helpers.trainers.training import run_document, running_trainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_copies()


@pytest.fixture(params=["file", "s3"])
def storage(request, tmp_path):
    """Object storage: a folder, and a server."""
    if request.param == "file":
        yield checked_address(f"file://{tmp_path}/stored")
        return
    with s3_server() as address:
        yield address


def steps_of(events) -> list[int]:
    return [event.step.policy_version for event in events if event.HasField("step")]


async def trained(document: dict, storage: Address, *, resume: bool = False):
    """A whole run of a trainer that is new; its events, and its warnings at the end."""
    roots = Roots([Path("/")], [storage])
    async with running_trainer(roots=roots) as trainer:
        await trainer.start(document, resume=resume)
        events = await trainer.events()
        state = await trainer.trainer.GetTrainer(trainer_pb2.GetTrainerRequest(), timeout=5)
    return events, list(state.warnings)


async def test_a_run_whose_folder_is_lost_goes_on_from_storage_with_model_and_data_from_there(
    tmp_path, model, storage
) -> None:
    broker = ScriptedTrainingBroker()
    put_folder(model, below(storage, "model"))
    stored = Storage(below(storage, "runs/r"))
    async with serving(broker.service()) as (_, target):
        places = {"checkpoint_storage": f"{storage}/runs", "keep_checkpoints": 1}
        document = run_document(
            tmp_path, model, target, num_steps=2, num_eval_prompts=0, checkpoint_every_steps=1, **places
        )
        Storage(storage).upload(tmp_path / "train.jsonl", "rows/train.jsonl")
        document["model"]["path"] = f"{storage}/model"
        document["data"] = {"train": f"{storage}/rows/train.jsonl"}
        events, warnings = await trained(document, storage)
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
        assert warnings == []
        files = read_manifest(stored.read(f"step_2/{MANIFEST_NAME}"))
        listed = Storage(below(stored.address, "step_2")).list()
        assert listed.keys() == {*files, MANIFEST_NAME}
        assert all(listed[name].size_bytes == file.size_bytes for name, file in files.items())
        assert {"resume/shard-00001.safetensors", "resume/trainer.json", "model.safetensors"} <= files.keys()
        assert stored.names() == {"step_2"}

        # Another machine: nothing of the run is there.
        shutil.rmtree(tmp_path / "runs")
        document["run"]["num_steps"] = 3
        again, _ = await trained(document, storage)
        assert "holds a run already; resume it" in again[-1].finished.message
        shutil.rmtree(tmp_path / "runs")
        resumed, _ = await trained(document, storage, resume=True)
        assert resumed[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, resumed[-1].finished.message
        assert steps_of(resumed) == [3]
    assert sorted(broker.trained.values()) == sorted(2 * [1, 2, 3])
    assert json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["outcome"] == "completed"
    lines = (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["policy_version"] for line in lines] == [1, 2, 3]
    assert CheckpointStorage(stored.address).newest() == 3


@pytest.mark.parametrize("storage", ["file"], indirect=True)
async def test_a_storage_that_refuses_stops_no_training_and_is_not_kept_quiet(
    tmp_path, model, storage, monkeypatch
) -> None:
    def refuse(*_) -> None:
        raise StorageError("the network is down")

    broker = ScriptedTrainingBroker()
    async with serving(broker.service()) as (_, target):
        stated = {"checkpoint_storage": f"{storage}/runs", "checkpoint_every_steps": 1}
        document = run_document(tmp_path, model, target, num_steps=2, num_eval_prompts=0, **stated)
        document["data"]["eval"] = None
        with monkeypatch.context() as broken:
            broken.setattr(Storage, "upload", refuse)
            events, warnings = await trained(document, storage)
        assert steps_of(events) == [1, 2]
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
        expected = "run.checkpoint_storage: the checkpoint of step 2 was not uploaded: the network is down"
        assert events[-1].finished.message == expected
        assert warnings == [events[-1].finished.message]
        # Once the storage is mended, the checkpoint that is in the folder is all that it takes.
        events, _ = await trained(document, storage, resume=True)
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
        assert steps_of(events) == []
        assert CheckpointStorage(below(storage, "runs/r")).newest() == 2


async def test_a_storage_that_cannot_be_written_to_ends_a_run_before_it_trains(tmp_path, model) -> None:
    (tmp_path / "file").touch()
    storage = checked_address(f"file://{tmp_path}/file/stored")
    async with serving(ScriptedTrainingBroker().service()) as (_, target):
        document = run_document(tmp_path, model, target, checkpoint_storage=storage)
        events, _ = await trained(document, storage)
    assert events[-1].finished.message.startswith(f"run.checkpoint_storage: {storage}/r/.writable: ")
    assert steps_of(events) == []


async def test_addresses_that_the_trainer_does_not_allow_are_refused_by_name(tmp_path, model) -> None:
    async with running_trainer(roots=Roots([Path("/")], [checked_address("s3://ours/runs")])) as trainer:
        for section, key in (("model", "path"), ("data", "train"), ("run", "checkpoint_storage")):
            document = run_document(tmp_path, model, "127.0.0.1:1")
            document[section][key] = "s3://others/secrets"
            with pytest.raises(Exception, match=rf"{section}.{key}: s3://others/secrets is not below s3://ours/runs"):
                await trainer.start(document)


class OwnedBroker(ScriptedTrainingBroker):
    """Counts take-overs, as a broker does."""

    num_owners, owner_id = 0, ""

    async def OpenRun(self, request, context):
        answer = await super().OpenRun(request, context)
        if request.takes_over:
            self.num_owners, self.owner_id = self.num_owners + 1, request.owner.owner_id
        answer.epoch = self.num_owners
        return answer

    async def GetRun(self, request, context):
        answer = await super().GetRun(request, context)
        answer.owner.owner_id, answer.owner.epoch = self.owner_id, self.num_owners
        return answer


@pytest.mark.parametrize("storage", ["file"], indirect=True)
async def test_what_a_killed_trainer_did_not_upload_is_left_when_others_took_it_again(tmp_path, model, storage) -> None:
    """Two machines with folders of their own; neither sees the folder that the run names."""
    broker = OwnedBroker()
    stored = Storage(below(storage, "runs/r"))

    async def trained_on(name: str, num_steps: int, *, resume: bool = True) -> list[int]:
        document["run"]["num_steps"] = num_steps
        roots = Roots([Path("/")], [storage], runs_dir=tmp_path / name)
        async with running_trainer(roots=roots) as trainer:
            await trainer.start(document, resume=resume)
            events = await trainer.events()
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
        return steps_of(events)

    def record(name: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / name / "r" / "metrics.jsonl").read_text().splitlines()]

    async with serving(broker.service()) as (_, target):
        places = {"checkpoint_storage": f"{storage}/runs", "keep_checkpoints": 3, "checkpoint_every_steps": 1}
        document = run_document(tmp_path, model, target, num_steps=3, num_eval_prompts=0, **places)
        assert await trained_on("a", 3, resume=False) == [1, 2, 3]
        # As if it was killed before its last checkpoint was uploaded.
        stored.delete("step_3")
        # A checkpoint may have been left out while the one before was uploaded.
        kept = CheckpointStorage(stored.address).newest()
        assert await trained_on("b", 3) == list(range(kept + 1, 4))
        assert record("b")[:kept] == record("a")[:kept]
        assert record("b")[2] != record("a")[2]
        assert await trained_on("a", 4) == [4]
        assert record("a")[:3] == record("b")
    assert not (tmp_path / "runs").exists()
