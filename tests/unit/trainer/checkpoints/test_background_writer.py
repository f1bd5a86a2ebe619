"""Checkpoints beside training: what is awaited, what is refused, what a full disk leaves."""

import asyncio
from concurrent.futures import Future

import pytest

from penstock.clock import SystemClock
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import ResumeState
from services.trainer.checkpoints.checkpoint_writer import Checkpoints
from services.trainer.compute.compute_thread import ComputeThread
from tests.helpers.full_disk import largest_file
from tests.helpers.waiting import until
from tests.unit.trainer.builders import RecordingBackend
from tests.unit.trainer.distributed.test_rank_backend import build_backend, model_directory  # noqa: F401


class SlowBackend(RecordingBackend):
    """Its files are written when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[Future[None]] = []

    def save(self, directory):
        (directory / "model.safetensors").write_bytes(b"weights")
        self.futures.append(Future())
        return self.futures[-1]


def state_at(step):
    return ResumeState(num_steps=step)


@pytest.fixture
def compute():
    thread = ComputeThread(clock=SystemClock(), on_span=lambda *_: None)
    yield thread
    thread.close()


@pytest.fixture
def written():
    return []


@pytest.fixture
def checkpoints(tmp_path, compute, written):
    return Checkpoints(tmp_path, keep_last=2, compute=compute, on_written=lambda version, _: written.append(version))


async def test_training_goes_on_while_files_are_written(checkpoints, written, tmp_path):
    backend = SlowBackend()
    await checkpoints.begin(backend, state_at(1))
    await checkpoints.begin(backend, state_at(1))
    assert (len(backend.futures), written, checkpoint.list_complete(tmp_path)) == (1, [], [])
    second = asyncio.create_task(checkpoints.begin(backend, state_at(2)))
    backend.futures[0].set_result(None)
    await second
    assert (len(backend.futures), written) == (2, [1])
    backend.futures[1].set_result(None)
    await checkpoints.finish()
    assert written == [1, 2]
    await checkpoints.begin(backend, state_at(2))
    assert len(backend.futures) == 2, "a step that has its checkpoint was saved again"


async def test_a_disk_that_refuses_is_reported_at_once_and_leaves_nothing_half_written(checkpoints, written, tmp_path):
    backend = SlowBackend()
    await checkpoints.begin(backend, state_at(1))
    backend.futures[0].set_result(None)
    await checkpoints.begin(backend, state_at(2))
    watching = asyncio.create_task(checkpoints.watch())
    backend.futures[1].set_exception(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        await watching
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert checkpoint.load_latest(tmp_path, backend=backend) == state_at(1)
    await checkpoints.begin(backend, state_at(3))
    backend.futures[2].set_result(None)
    await until(lambda: written == [1, 3], timeout_s=10)
    await checkpoints.finish()


@pytest.mark.parametrize("room", [1024, 100_000])
def test_a_file_that_cannot_grow_fails_the_save_with_its_path(tmp_path, model_directory, room):  # noqa: F811
    """The kernel refuses the write, as on a full disk: of the exported weights, and of what resumes training."""
    backend = build_backend(model_directory)
    backend.optimizer_step(divisor=1)
    checkpoint.begin(tmp_path, backend=backend, state=state_at(1)).finish(keep_last=2)
    size = (tmp_path / "step_1" / "model.safetensors").stat().st_size
    assert size < 100_000 < max(path.stat().st_size for path in (tmp_path / "step_1" / "resume").iterdir())
    with largest_file(room):
        saving = checkpoint.begin(tmp_path, backend=backend, state=state_at(2))
        with pytest.raises(OSError, match="too large"):
            saving.finish(keep_last=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert checkpoint.load_latest(tmp_path, backend=backend) == state_at(1)
