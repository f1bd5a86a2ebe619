"""How many bytes the processes of a trainer exchange, for trainers that count and planners that predict."""

from __future__ import annotations

from penstock.model.training_memory import GRADIENT_BYTES, ModelShape, TrainingMode


def gathered_bytes(shape: ModelShape, mode: TrainingMode, *, num_passes: float, num_scoring_passes: float = 0) -> float:
    """Weights that processes gather in a step: for the forward passes, and again for the backward passes.

    Each process receives all of it but its own shard, (n - 1) / n of it among n processes.

    Args:
        shape: Of the model.
        mode: How it is trained.
        num_passes: Forward and backward passes, one for each pack of a process; a mean may have a fraction.
        num_scoring_passes: Forward passes alone, for log-probs.
    """
    if mode.num_shards == 1:
        return 0.0
    return mode.weight_bytes * shape.num_params * (2 * num_passes + num_scoring_passes)


def reduced_bytes(shape: ModelShape, mode: TrainingMode, *, num_passes: float) -> float:
    """Gradients that processes add up in a step; each process sends all but its own shard of them."""
    return 0.0 if mode.num_shards == 1 else GRADIENT_BYTES * shape.num_params * num_passes
