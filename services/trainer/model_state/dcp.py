"""Tensors that resume training: PyTorch's distributed checkpoints (DCP) over safetensors, in a folder of a checkpoint.

Each process writes its part of every tensor, with that part's place in the whole, to a file of its own, so that any
number of processes can read them. The format is safetensors throughout: nothing is unpickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.process.disk import is_full
from services.trainer.model.backend import CheckpointMismatchError
from services.trainer.model_state.weight_file import write_alone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FOLDER = "resume"
"""In a checkpoint's directory, apart from the files that `from_pretrained` reads."""


def shard_name(number: int) -> str:
    """The file of one process, counted from 1."""
    return f"shard-{number:05d}.safetensors"


def write_resume(tensors: Mapping[str, Tensor], directory: Path, *, group: ProcessGroup | None = None) -> Path | None:
    """Writes the part of `tensors` that this process holds, and returns its file, if it holds any.

    Args:
        tensors: By name; sharded ones are DTensors of the same mesh in every process.
        directory: The checkpoint; the files go to its FOLDER.
        group: The processes that save together, all of which call this; None for a single process.

    Raises:
        OSError: A disk refused, this process' or another's.
    """
    _expect_to_be_alone(group)
    writer = _TensorwiseWriter(str(directory / FOLDER), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _refusal(error, directory) from error
    return writer.written


class _TensorwiseWriter(HuggingFaceStorageWriter):  # type: ignore[misc]  # it has no types
    """Writes each process' file tensor by tensor; PyTorch's own makes all of it in memory first, twice."""

    written: Path | None = None
    """The file, once it is."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            name, found = item.index.fqn, planner.resolve_data(item)
            if item.tensor_data is None or not isinstance(found, Tensor):
                raise TypeError(f"{name} is no tensor")
            tensors[name] = found
            offsets[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        number = plan.storage_data["shard_index"]
        metadata = {CUSTOM_METADATA_KEY: json.dumps(offsets), "format": "pt"}
        path = Path(self.path) / shard_name(number)
        write_alone(path, tensors, metadata=metadata)
        self.written = path
        # The results are not used: each file says where its tensors belong.
        results: Future[list[WriteResult]] = Future()
        results.set_result([])
        return results


def stated_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and element types of everything that `write_resume` wrote, in any process.

    Raises:
        CheckpointMismatchError: The files cannot be read.
    """
    try:
        metadata = HuggingFaceStorageReader(str(directory / FOLDER)).read_metadata()
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointMismatchError(f"{directory}: its tensors cannot be read: {error}") from error
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def check_resume(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Whether `read_resume` can fill `tensors`.

    Raises:
        CheckpointMismatchError: One is missing, has another shape or another element type.
    """
    stated = stated_tensors(directory)
    for name, tensor in tensors.items():
        entry = stated.get(name)
        if entry is None:
            raise CheckpointMismatchError(f"{directory}: holds no {name}")
        if entry.size != tensor.shape or entry.properties.dtype != tensor.dtype:
            raise CheckpointMismatchError(
                f"{directory}: {name} is {entry.properties.dtype} {list(entry.size)}, the model has {tensor.dtype} "
                f"{list(tensor.shape)}"
            )


def read_resume(tensors: Mapping[str, Tensor], directory: Path, *, group: ProcessGroup | None = None) -> None:
    """Fills `tensors`, which were checked, with what was written; sharded ones with this process' part.

    Raises:
        CheckpointMismatchError: A file is damaged.
    """
    _expect_to_be_alone(group)
    reader = HuggingFaceStorageReader(str(directory / FOLDER))
    try:
        dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointMismatchError(f"{directory}: {_described(error)}") from error


def _refusal(error: CheckpointException, directory: Path) -> OSError:
    """The error of a disk, with its number if a process stated one: a full disk is recognised by it."""
    message = f"{directory}: {_described(error)}"
    causes = [cause for cause, _ in error.failures.values() if isinstance(cause, OSError) and cause.errno is not None]
    if not causes:
        return OSError(message)
    return OSError(next(filter(is_full, causes), causes[0]).errno, message)


def _described(error: CheckpointException) -> str:
    """Which processes failed and why, without the traces."""
    return "; ".join(f"process {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items()))


def _expect_to_be_alone(group: ProcessGroup | None) -> None:
    # DCP warns at each use without other processes, which is the common case here.
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
