"""What the formulas say that processes of the run need for the model, beside their libraries."""

from __future__ import annotations

from pathlib import Path

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import TrainingMode, held_bytes, published_bytes, working_bytes

GIB = 1024**3
WEIGHT_BYTES = 2
"""Of a weight in bfloat16, in which versions are published."""


def model_mb(model: Path, mode: TrainingMode, *, kv_cache_gib: float) -> dict[str, float]:
    """MB of each process that holds a model, or drives one.

    Args:
        model: The model's folder.
        mode: How it is trained.
        kv_cache_gib: Of the engine.
    """
    shape = read_shape(model)
    # A version is copied and written while the next step is computed.
    training = held_bytes(shape, mode) + working_bytes(shape, mode) + published_bytes(shape, mode)
    weights = WEIGHT_BYTES * shape.num_params
    # Both map the file of the version that they check, or install. vLLM packs the output layer beside its weight, which
    # may be the embedding's.
    engine = 2 * weights + WEIGHT_BYTES * shape.embedding_params + kv_cache_gib * GIB
    return {
        "trainer": training / 1e6,
        "trainer-1": training / 1e6,
        "generator-0": weights / 1e6,
        "engine": engine / 1e6,
    }
