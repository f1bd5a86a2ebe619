"""Compares what processes of several machines see: whether they have one run folder, and equal models.

A model is compared by names, sizes, and the first and last MiB of every file: each process reads its own part of the
weights from its own copy, and parts of two models would make a third without an error. Of a model in object storage
the digest of everything is compared.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.config import ConfigError
from penstock.storage.addresses import Address
from penstock.storage.fetched import fetched
from penstock.storage.object_cache import content_digest

_COMPARED = ("config.json", "*.safetensors", "*.safetensors.index.json")
_COMPARED_BYTES = 1024**2


@contextmanager
def mark_in(run_dir: Path) -> Iterator[Path]:
    """A new file in the run folder, for as long as the others look for it. Raises ConfigError if none can be made."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".seen_by_all_", dir=run_dir) as mark:
            yield Path(mark.name)
    except OSError as error:
        raise ConfigError(f"run.dir: {run_dir} cannot be written to: {error.strerror}") from error


def away_from(mark: Path) -> str | None:
    """Why this machine cannot write into the run folder of the first process, where `mark` is; None if it can."""
    if mark.exists():
        return None
    return (
        f"run.dir: {socket.gethostname()} does not see {mark.parent} as the first process does: all processes of a "
        "trainer write their parts of checkpoints into it; put it on a disk that they share, or checkpoints into "
        "object storage with run.checkpoint_storage"
    )


def difference(model: Path | Address, fingerprint: str) -> str | None:
    """How the model differs from that of the first process; None if it does not.

    Args:
        model: Its folder here, or its address.
        fingerprint: Of it where the first process runs.
    """
    host = socket.gethostname()
    try:
        own = fingerprint_of(model)
    except (ConfigError, OSError) as error:
        return f"{host}: {error}"
    if own != fingerprint:
        found = "is none" if own is None else "is another than that of the first process"
        fix = (
            "copy the same folder to both"
            if isinstance(model, Path)
            else "it has changed meanwhile; start the run again"
        )
        return f"model.path: the model in {model} on {host} {found}; {fix}"
    return None


def fingerprint_of(model: Path | Address) -> str | None:
    """A digest, in hexadecimal digits, of what is compared of a model; None if it is none.

    Of one in object storage all of it, which was digested when it was fetched. Raises ConfigError, StorageError.
    """
    if not isinstance(model, Path):
        return content_digest(fetched("model.path", model, "model"))
    if not (model / "config.json").is_file():
        return None
    files = sorted({path for pattern in _COMPARED for path in model.glob(pattern)})
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(file.read(_COMPARED_BYTES))
            file.seek(max(0, size - _COMPARED_BYTES))
            digest.update(file.read(_COMPARED_BYTES))
    return digest.hexdigest()
