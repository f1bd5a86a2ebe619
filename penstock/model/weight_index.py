"""Checks the files of a model's weights, and the index where they are several, before anything loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.model.digests import MalformedWeightsError, safetensors_shapes
from penstock.model.model_folder import read_mapping

INDEX_FILE = "model.safetensors.index.json"


def check_weights(folder: Path) -> None:
    """Checks that there are weights, that each file is whole, and that the index fits them. Only headers are read.

    Raises:
        ValueError: There are none, or a file or the index is damaged; the message names it.
        OSError: A file cannot be read.
    """
    check_index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: holds no *.safetensors; copy the model's weights there, too")
    for file in files:
        try:
            safetensors_shapes(file)
        except MalformedWeightsError as error:
            raise ValueError(
                f"{folder}: its weights cannot be read: {error}; the file is damaged or cut short, copy it again"
            ) from error


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
