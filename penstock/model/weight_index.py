"""Checks the index of a model whose weights are in several files, before anything loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.model.digests import MalformedWeightsError, safetensors_shapes
from penstock.model.model_folder import read_mapping

INDEX_FILE = "model.safetensors.index.json"


def check_index(folder: Path) -> None:
    """Checks that every tensor is where the index says: in a file of the folder itself.

    Without an index there is nothing to check. Only headers are read.

    Raises:
        ValueError: The index names a file that is elsewhere, missing or damaged, or a tensor that its file lacks.
        OSError: A file cannot be read.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        return
    named = read_mapping(path).get("weight_map")
    if not isinstance(named, Mapping) or not named:
        raise ValueError(f"{path}: has no weight_map, which names the file of each tensor")
    held: dict[str, frozenset[str]] = {}
    for tensor, file in named.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: weight_map.{tensor}: {file!r:.200} is no file of this folder")
        if file not in held:
            held[file] = _tensors_of(folder / file, index=path)
        if tensor not in held[file]:
            raise ValueError(f"{path}: weight_map.{tensor}: {file} does not hold it; copy index and files again")


def _tensors_of(file: Path, *, index: Path) -> frozenset[str]:
    if not file.is_file():
        raise ValueError(f"{index}: {file.name}, which it names, is missing; copy the model again")
    try:
        return frozenset(safetensors_shapes(file))
    except MalformedWeightsError as error:
        raise ValueError(f"{file.parent}: its weights cannot be read: {error}") from error
