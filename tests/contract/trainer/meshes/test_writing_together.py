"""Several processes write one file: published weights, checkpoints, and what happens when one of them cannot."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.model.digests import safetensors_digests
from penstock.transfer.chunks import chunks_of
from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.weight_digests import digest_together
from services.trainer.model_state.weight_file import part_of, write_together
from tests.helpers.full_disk import largest_file
from tests.helpers.trainers.equal_training import train
from tests.helpers.trainers.two_processes import alone, two_processes, weights
from tests.unit.trainer.builders import save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_forked = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def resume_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What training continues from, as one process that loads it holds it."""
    found: dict[str, list[torch.Tensor]] = {}
    for path in sorted((directory / "resume").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts) if parts[0].dim() else parts[0] for name, parts in found.items()}


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.grid), {"lora": True}, {"processes": 3}],
    ids=str,
)
def test_many_processes_write_the_bytes_that_one_would_and_resume_each_other_exactly(model, tmp_path, changes):
    for name in ("of_many", "of_one"):
        (tmp_path / name).mkdir()
    with two_processes(model, **changes) as many:
        train(many, 1)
        whole = weights(many)
        written = many.write_weights(tmp_path / "published").result()
        many.save(tmp_path / "of_many").result()
        one = alone(model, **changes)
        one.load(tmp_path / "of_many")
        # One process that continues holds the same bits, publishes the same bytes and saves the same state.
        assert one.write_weights(tmp_path / "by_one").result().tensors == written.tensors
        one.save(tmp_path / "of_one").result()
        assert (tmp_path / "by_one").read_bytes() == (tmp_path / "published").read_bytes()
        assert_same_checkpoint(tmp_path / "of_one", tmp_path / "of_many")
        train(many, 2)
        many.load(tmp_path / "of_one")
        assert many.write_weights(tmp_path / "again").result().tensors == written.tensors
    save_file(whole, tmp_path / "gathered")
    assert written.tensors == safetensors_digests(tmp_path / "gathered")
    assert list(written.chunks) == chunks_of(tmp_path / "published")


def assert_same_checkpoint(one: Path, many: Path) -> None:
    files = [{path.name: path.read_bytes() for path in each.iterdir() if path.is_file()} for each in (one, many)]
    assert files[0] == files[1]
    state, other = resume_tensors(one), resume_tensors(many)
    # Each process has random numbers of its own.
    names = {name for name in state.keys() | other.keys() if not name.startswith("random/")}
    assert all(torch.equal(state[name], other[name]) for name in names)


def _rank(rank: int, store: str, path: Path, answer: Connection, fault: Callable[[int], None] | None) -> None:
    """One of two processes; sends how long it took and what came of it."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(300_000, dtype=torch.float32).reshape(-1, 3), mesh, [Shard(0)])
    part = part_of(tensor, dtype=None, rank=rank)
    writers = Writers(rank=rank, num_ranks=2, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=40)))
    begun = time.monotonic()
    try:
        if fault is not None:
            with fault(rank):
                write_together(path, {"weight": part}, writers=writers)
        else:
            write_together(path, {"weight": part}, writers=writers)
        digest_together(path, writers=writers)
        outcome = (0, "")
    except OSError as error:
        outcome = (error.errno, str(error))
    answer.send((time.monotonic() - begun, *outcome))


class Full:
    """No room for all of this process' rows."""

    def __init__(self, rank: int) -> None:
        self._limit = largest_file(1_100_000) if rank == 1 else None

    def __enter__(self) -> None:
        if self._limit is not None:
            self._limit.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._limit is not None:
            self._limit.__exit__(*exception)


class Dying:
    """Its process dies before it wrote anything."""

    def __init__(self, rank: int) -> None:
        if rank == 1:
            os._exit(1)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Elsewhere:
    """The second process is on a machine that has the folder, too, but another one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        if self._rank == 1:
            real = os.open

            def missing(path: object, *rest: object, **named: object) -> int:
                if str(path).endswith(".tmp"):
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
                return real(path, *rest, **named)

            os.open = missing

    def __exit__(self, *_: object) -> None: ...


def outcomes(tmp_path: Path, fault: Callable[[int], None]) -> list[tuple[float, int, str] | None]:
    """Of both processes; None of one that died."""
    (tmp_path / "weights").mkdir()
    path, store = tmp_path / "weights" / "v1", str(tmp_path / "store")
    pipes = [_forked.Pipe(duplex=False) for _ in range(2)]
    processes = [
        _forked.Process(target=_rank, args=(rank, store, path, pipes[rank][1], fault), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode is not None, "it hangs"
    return [reader.recv() if reader.poll() else None for reader, _ in pipes]


def test_a_disk_that_is_full_for_one_of_them_is_full_for_all_and_nothing_is_left(tmp_path):
    (first, second) = outcomes(tmp_path, Full)
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (errno.EFBIG, errno.EFBIG)
    assert "process 1: File too large" in first[2]
    assert list((tmp_path / "weights").iterdir()) == []


def test_one_that_dies_is_noticed_at_once_and_no_half_file_is_left(tmp_path):
    first, second = outcomes(tmp_path, Dying)
    assert second is None
    assert first is not None
    assert first[0] < 30
    assert "another process was lost" in first[2]
    assert list((tmp_path / "weights").iterdir()) == []


def test_one_that_does_not_see_the_folder_is_named(tmp_path):
    first, _ = outcomes(tmp_path, Elsewhere)
    assert first is not None
    assert "process 1: does not see this file: all processes of a trainer need the same folder" in first[2]
    assert list((tmp_path / "weights").iterdir()) == []
