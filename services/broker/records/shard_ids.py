"""Names the documents that hold the tokens of a run's samples under way, beside the run's own."""

from __future__ import annotations

MAX_TOKEN_SHARDS = 1_024
_SEPARATOR = "#"
"""No run id contains it."""


def shard_id(run_id: str, shard: int) -> str:
    """The document of a token shard, from 1; of shard 0, which is the run itself."""
    return f"{run_id}{_SEPARATOR}{shard}" if shard else run_id


def is_shard_id(document_id: str) -> bool:
    """Whether this names a token shard, not a run."""
    return _SEPARATOR in document_id


def run_and_shard(document_id: str) -> tuple[str, int]:
    """The run and the number of a token shard."""
    run_id, _, shard = document_id.rpartition(_SEPARATOR)
    return run_id, int(shard)
