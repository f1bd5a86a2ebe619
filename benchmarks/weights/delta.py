"""Measures bytes and time of a delta: written by the trainer, applied and checked by a receiver, each on one core.

    penstock bench weights.delta --size-mib 256

Changes are synthetic, as their names describe; how many values a training step moves depends on model, learning rate
and type.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.scratch import scratch_folder
from penstock.deltas.content import apply_deltas, write_delta
from penstock.model.digests import manifest_digest, safetensors_digests

MIB = 1024 * 1024
NUM_TENSORS = 8
_Bits = npt.NDArray[np.unsignedinteger]


def _random_bits(old: _Bits, rng: np.random.Generator) -> _Bits:
    """2 % of the bf16 values get random bits, all 16: the highest possible cost of that many changes."""
    where = np.flatnonzero(rng.random(old.size, dtype=np.float32) < 0.02)
    new = old.copy()
    new[where] ^= rng.integers(1, 2**16, where.size, dtype=np.uint16)
    return new


def _one_step(old: _Bits, rng: np.random.Generator) -> _Bits:
    """2 % of the bf16 values move to a neighbouring value, as they do in training."""
    where = np.flatnonzero(rng.random(old.size, dtype=np.float32) < 0.02)
    new = old.copy()
    new[where] += rng.choice(np.array([1, 2**16 - 1], np.uint16), where.size)
    return new


def _every_value(old: _Bits, rng: np.random.Generator) -> _Bits:
    """Every fp32 value moves by 1e-6: AdamW's first steps at that learning rate."""
    moves = np.where(rng.random(old.size, dtype=np.float32) < 0.5, np.float32(1e-6), np.float32(-1e-6))
    return np.asarray((old.view(np.float32) + moves).view(np.uint32))


CHANGES: dict[str, tuple[str, Callable[[_Bits, np.random.Generator], _Bits]]] = {
    "bf16_2_percent_random": ("BF16", _random_bits),
    "bf16_2_percent_one_step": ("BF16", _one_step),
    "fp32_every_value": ("F32", _every_value),
}


def measure(*, size_bytes: int, num_repetitions: int) -> dict[str, Any]:
    """For each kind of change: size of the delta over that of the full content, and model bytes per second.

    Applying includes the copy of the base and the check of every tensor of the result.
    """
    result: dict[str, Any] = {"size_bytes": size_bytes, "num_repetitions": num_repetitions}
    for name, (dtype, change) in CHANGES.items():
        with scratch_folder() as folder:
            result[name] = _measure(folder, dtype, change, size_bytes, num_repetitions)
    return result


def _measure(
    folder: Path,
    dtype: str,
    change: Callable[[_Bits, np.random.Generator], _Bits],
    size_bytes: int,
    num_repetitions: int,
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    old = [_weights(dtype, size_bytes // NUM_TENSORS, rng) for _ in range(NUM_TENSORS)]
    base, new, delta, made = (folder / name for name in ("base", "new", "delta", "made"))
    _write(base, dtype, old)
    _write(new, dtype, [change(bits, rng) for bits in old])
    base_digest, tensors = manifest_digest(safetensors_digests(base)), safetensors_digests(new)
    digest = manifest_digest(tensors)
    writes, applications = [], []
    size: int | None = None
    for _ in range(num_repetitions):
        start = time.perf_counter()
        size = write_delta(base, new, delta, base_digest=base_digest, digest=digest, max_bytes=size_bytes)
        written = time.perf_counter()
        apply_deltas(base, [delta], made, base_digest=base_digest, tensors=tensors, digest=digest)
        writes.append(size_bytes / (written - start))
        applications.append(size_bytes / (time.perf_counter() - written))
    if size is None:
        raise RuntimeError("a delta that was to be measured came out larger than the weights")
    return {
        "bytes_ratio": size / new.stat().st_size,
        "write_bytes_per_second": statistics.median(writes),
        "apply_bytes_per_second": statistics.median(applications),
        "spread": {
            "write_bytes_per_second": [min(writes), max(writes)],
            "apply_bytes_per_second": [min(applications), max(applications)],
        },
    }


def _weights(dtype: str, size_bytes: int, rng: np.random.Generator) -> _Bits:
    """Bits of normally distributed values of the magnitude of weights."""
    if dtype == "F32":
        return np.asarray((rng.standard_normal(size_bytes // 4, np.float32) * np.float32(0.02)).view(np.uint32))
    values = rng.standard_normal(size_bytes // 2, np.float32) * np.float32(0.02)
    return np.asarray((values.view(np.uint32) >> 16).astype(np.uint16))


def _write(path: Path, dtype: str, tensors: list[_Bits]) -> None:
    """A safetensors file, written by hand because numpy has no bf16."""
    header, offset = {}, 0
    for number, bits in enumerate(tensors):
        end = offset + bits.nbytes
        header[f"layers.{number}.weight"] = {"dtype": dtype, "shape": [bits.size], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors:
            file.write(bits.data)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=256, help="size of the synthetic weights")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(size_bytes=arguments.size_mib * MIB, num_repetitions=arguments.repetitions), indent=2))


if __name__ == "__main__":
    main()
