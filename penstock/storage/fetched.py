"""What a configuration names, as a path of this machine: the one place where services fetch from object storage."""

from __future__ import annotations

import threading
from pathlib import Path, PurePosixPath

from penstock.config import ConfigError
from penstock.storage.addresses import Address
from penstock.storage.object_cache import ObjectCache
from penstock.storage.storage import StorageError

_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"))
_fetching = threading.Lock()
_cache: list[ObjectCache] = []
_found: dict[tuple[Address, bool], Path] = {}


def fetched(field: str, source: Path | Address, *, has_weights: bool = True) -> Path:
    """A path as it is; of an address the copy in this machine's cache, made if necessary. Blocks meanwhile.

    Between two calls of `forget_copies` a process gets the same copy at each call, even if the stored content changes.

    Args:
        field: Of the configuration, named in errors.
        source: What it says.
        has_weights: False leaves out files of weights.

    Raises:
        ConfigError: There is no such content, it cannot be read, or it does not fit on the disk.
        StorageError: The storage failed, and may do better later.
    """
    if isinstance(source, Path):
        return source
    with _fetching:
        key = (source, has_weights)
        if key not in _found:
            try:
                if not _cache:
                    _cache.append(ObjectCache.of_user())
                _found[key] = _cache[0].fetch(source, wanted=lambda name: has_weights or not _is_weights(name))
            except ConfigError as error:
                raise ConfigError(f"{field}: {error}") from error
            except OSError as error:
                raise StorageError(f"{field}: {error}") from error
        return _found[key]


def forget_copies() -> None:
    """What is fetched from now on is what the storage has then."""
    with _fetching:
        _found.clear()


def _is_weights(name: str) -> bool:
    return PurePosixPath(name).suffix in _WEIGHT_SUFFIXES
