"""Copies a checkpoint's shards to object storage: each process the one that it wrote, from its own disk."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from penstock.config import ConfigError
from penstock.storage.addresses import Address
from penstock.storage.storage import FileDigest, Storage
from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.dcp import FOLDER, shard_name

_DIGEST_BYTES = 32
_log = structlog.get_logger()


def upload_shards(shard: Path | None, address: Address, *, writers: Writers) -> dict[str, FileDigest]:
    """The shards that were copied, by their names below the address, in all processes, all of which call this.

    Args:
        shard: This process' own file; None if it has none to copy.
        address: Of the checkpoint.
        writers: The processes.

    Raises:
        ConfigError: This process may not write there.
        OSError: The storage refused, this process or another, or another was lost.
    """
    uploaded = writers.do(Path(address), lambda: _uploaded(shard, address))
    rows = torch.zeros(writers.num_ranks, 2 + _DIGEST_BYTES, dtype=torch.int64)
    if shard is not None and uploaded is not None:
        digest = [*bytes.fromhex(uploaded.blake3)]
        rows[writers.rank] = torch.tensor([number_of(shard), uploaded.size_bytes, *digest])
    found = writers.added_up(rows, Path(address)).tolist()
    return {
        f"{FOLDER}/{shard_name(number)}": FileDigest(size_bytes=size, blake3=bytes(digest).hex())
        for number, size, *digest in found
        if number
    }


def number_of(shard: Path) -> int:
    """The number in a shard's name, from 1 on."""
    return int(shard.stem.rpartition("-")[2])


def _uploaded(shard: Path | None, address: Address) -> FileDigest | None:
    if shard is None:
        return None
    try:
        return Storage(address).upload(shard, f"{FOLDER}/{shard.name}")
    except (ConfigError, OSError) as error:
        # The first process hears only that it failed here.
        _log.error("a part of a checkpoint cannot be uploaded", address=address, error=str(error))
        raise
