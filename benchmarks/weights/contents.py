"""Makes synthetic weights and their manifests, and places them for measuring."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.transfer.chunks import chunks_of
from penstock.v1 import weights_pb2

RUN_ID = "bench"
NUM_TENSORS = 8


def write_weights(path: Path, *, size_bytes: int, seed: int = 0) -> None:
    """Random bytes as tensors, which cannot be compressed."""
    rng = np.random.default_rng(seed)
    tensors = {
        f"w{number}": np.frombuffer(rng.bytes(size_bytes // NUM_TENSORS), np.uint8) for number in range(NUM_TENSORS)
    }
    save_file(tensors, path)


def make_manifest(path: Path, *, url: str, policy_version: int = 0) -> weights_pb2.WeightsManifest:
    """The manifest of a full version, with chunks of a trainer's size."""
    infos = safetensors_digests(path)
    return weights_pb2.WeightsManifest(
        run_id=RUN_ID,
        policy_version=policy_version,
        kind=weights_pb2.WEIGHTS_KIND_FULL,
        encoding=weights_pb2.WEIGHTS_ENCODING_SAFETENSORS,
        tensors=infos,
        chunks=chunks_of(path),
        digest=manifest_digest(infos),
        size_bytes=path.stat().st_size,
        urls=[url],
    )


def median_and_spread(rows: Sequence[dict[str, float]]) -> dict[str, object]:
    """The median of each number over repetitions, and its minimum and maximum under `spread`."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        **{name: statistics.median(values) for name, values in columns.items()},
        "num_repetitions": len(rows),
        "spread": {name: [min(values), max(values)] for name, values in columns.items()},
    }
