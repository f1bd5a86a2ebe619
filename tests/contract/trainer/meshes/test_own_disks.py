"""Two processes on two machines without a shared disk: versions reach the first one, checkpoints object storage."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from penstock.config import ConfigError
from penstock.model.digests import safetensors_digests
from penstock.storage.addresses import checked_address
from penstock.storage.fetched import forget_copies
from penstock.transfer.chunks import chunks_of
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import ResumeState
from services.trainer.checkpoints.checkpoint_storage import CheckpointStorage
from services.trainer.model_state import sent_parts
from services.trainer.run_sections import RunSettings
from tests.helpers.trainers.equal_training import train
from tests.helpers.trainers.own_disks import needs_root, two_disks
from tests.helpers.trainers.two_processes import alone, two_processes, weights
from tests.unit.trainer.builders import save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_root]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with a folder of its own on each machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_copies()
    (tmp_path / "runs" / "r").mkdir(parents=True)
    storage = checked_address(f"file://{tmp_path}/stored")
    return RunSettings(id="r", dir=tmp_path / "runs", checkpoint_storage=storage)


def saved(backend, root, storage: CheckpointStorage, *, step: int):
    """A checkpoint in the storage, as a run makes it."""
    saving = checkpoint.begin(root, backend=backend, state=ResumeState(num_steps=step))
    directory = saving.wait()
    storage.begin(step)
    uploaded = backend.upload(directory, storage.address(step)).result()
    storage.complete(step, directory, uploaded, keep_last=2)
    return uploaded


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"parallel": {"tensor": 2}, "dtype": "bfloat16"}, marks=pytest.mark.grid)],
    ids=str,
)
def test_they_publish_and_save_what_two_on_one_disk_do_and_resume_each_other_exactly(model, tmp_path, run, changes):
    root = run.dir / "r" / "checkpoints"
    storage = CheckpointStorage(checked_address(f"{run.checkpoint_storage}/r"))
    with two_disks(model, run, **changes) as spread:
        assert spread.is_spread
        train(spread, 1)
        whole = weights(spread)
        written = spread.write_weights(run.dir / "r" / "v1").result()
        uploaded = saved(spread, root, storage, step=1)
        # Each process has copied its own.
        assert sorted(uploaded) == ["resume/shard-00001.safetensors", "resume/shard-00002.safetensors"]
        assert sorted(path.name for path in (root / "step_1.tmp" / "resume").glob("*.safetensors")) == [
            "shard-00001.safetensors"
        ]
        losses = train(spread, 2)
        spread.load(storage.address(1))
        assert train(spread, 2) == losses
    save_file(whole, tmp_path / "gathered")
    assert written.tensors == safetensors_digests(tmp_path / "gathered") == safetensors_digests(run.dir / "r" / "v1")
    assert list(written.chunks) == chunks_of(run.dir / "r" / "v1")
    # A machine that has nothing of the run but the address.
    one = alone(model, **changes)
    one.load(storage.address(storage.newest()))
    assert one.write_weights(tmp_path / "by_one").result().tensors == written.tensors
    with two_processes(model, **changes) as many:
        many.load(storage.address(1))
        assert train(many, 2) == losses


def test_without_object_storage_they_are_refused_by_name(model, run):
    refused = run.model_copy(update={"checkpoint_storage": None})
    with (
        pytest.raises(ConfigError, match=r"run.dir: .* does not see .*with run.checkpoint_storage"),
        two_disks(model, refused),
    ):
        pass


def test_pieces_smaller_than_a_run_of_rows_land_in_their_places(tmp_path):
    """Of columns 2 to 4 in each of three rows of 8, in pieces of two bytes."""
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    content = bytes(range(1, 10))
    row = [2, 8, 3, 3]
    with file.open("r+b") as opened:
        for begin in range(0, 9, 2):
            sent_parts._write(opened.fileno(), memoryview(content[begin : begin + 2]), begin, row, 10)
    expected = torch.zeros(100, dtype=torch.uint8)
    expected[10:34].view(3, 8)[:, 2:5] = torch.tensor([*content], dtype=torch.uint8).view(3, 3)
    assert file.read_bytes() == bytes(expected.tolist())
