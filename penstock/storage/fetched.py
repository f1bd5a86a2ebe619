"""What a configuration names, as a path of this machine: the one place where services fetch from object storage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Literal, ParamSpec, TypeVar

from penstock.config import ConfigError
from penstock.storage.addresses import Address
from penstock.storage.object_cache import ObjectCache
from penstock.storage.storage import StorageError

Part = Literal["all", "model", "tokenizer"]
"""What is needed of a folder: everything, all but a checkpoint's `resume/`, or that without weights."""
_RESUME = "resume/"
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"))
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_fetching = threading.Lock()
_given_up = threading.Event()
_cache: list[ObjectCache] = []
_found: dict[tuple[Address, Part], Path] = {}


def fetched(field: str, source: Path | Address, part: Part = "all") -> Path:
    """A path as it is; of an address the copy in this machine's cache, made if necessary. Blocks meanwhile.

    Between two calls of `forget_copies` a process gets the same copy at each call, even if the stored content changes.

    Args:
        field: Of the configuration, named in errors.
        source: What it says.
        part: What is needed of a folder.

    Raises:
        ConfigError: There is no such content, it cannot be read, or it does not fit on the disk.
        StorageError: The storage failed, and may do better later.
    """
    if isinstance(source, Path):
        return source
    with _fetching:
        key = (source, part)
        if key not in _found:
            try:
                if not _cache:
                    _cache.append(ObjectCache.of_user())
                _found[key] = _cache[0].fetch(
                    source, wanted=lambda name: _is_wanted(name, part), is_given_up=_given_up.is_set
                )
            except ConfigError as error:
                raise ConfigError(f"{field}: {error}") from error
            except OSError as error:
                raise StorageError(f"{field}: {error}") from error
        return _found[key]


def forget_copies() -> None:
    """What is fetched from now on is what the storage has then."""
    with _fetching:
        _given_up.clear()
        _found.clear()


async def beside_loop(
    function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """`function(*args)`, which fetches, in a thread; if its caller is cancelled, so is what it fetches."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except asyncio.CancelledError:
        _given_up.set()
        raise


def _is_wanted(name: str, part: Part) -> bool:
    is_weights = PurePosixPath(name).suffix in _WEIGHT_SUFFIXES
    return part == "all" or not (name.startswith(_RESUME) or (part == "tokenizer" and is_weights))
