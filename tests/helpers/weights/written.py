"""Weights written as a backend does, from tensors at hand."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.weight_digests import digest_together
from services.trainer.model_state.weight_file import part_of, write_together
from services.trainer.publishing.written_weights import WrittenWeights


def write(tensors: Mapping[str, Tensor], path: Path) -> WrittenWeights:
    """One process' file."""
    parts = {name: part_of(tensor, dtype=None, rank=0) for name, tensor in tensors.items()}
    write_together(path, parts, writers=Writers())
    return digest_together(path, writers=Writers())


def written(tensors: Mapping[str, Tensor], path: Path) -> Future[WrittenWeights]:
    """The same as a backend's answer, with its error if it failed."""
    future: Future[WrittenWeights] = Future()
    try:
        future.set_result(write(tensors, path))
    except OSError as error:
        future.set_exception(error)
    return future
