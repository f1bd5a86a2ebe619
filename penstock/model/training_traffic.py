"""How many bytes the processes of a trainer exchange, for trainers that count and planners that predict."""

from __future__ import annotations

from penstock.model.decoder_shape import ModelShape
from penstock.model.training_memory import GRADIENT_BYTES, TrainingMode


def gathered_bytes(shape: ModelShape, mode: TrainingMode, *, num_passes: float, num_scoring_passes: float = 0) -> float:
    """Weights that processes gather in a step: for the forward passes, and again for the backward passes.

    Each process receives all of it but its own shard, (n - 1) / n of it among n processes.

    Args:
        shape: Of the model.
        mode: How it is trained.
        num_passes: Forward and backward passes, one for each pack of a process; a mean may have a fraction.
        num_scoring_passes: Forward passes alone, for log-probs.
    """
    return mode.weight_bytes * _gathered_params(shape, mode) * (2 * num_passes + num_scoring_passes)


def reduced_bytes(shape: ModelShape, mode: TrainingMode, *, num_passes: float) -> float:
    """Gradients that processes add up in a step; each process sends all but its own shard of them."""
    return GRADIENT_BYTES * _gathered_params(shape, mode) * num_passes


def exchanged_bytes(
    shape: ModelShape, mode: TrainingMode, *, num_tokens: float, num_scoring_tokens: float = 0
) -> float:
    """Copies of tokens that one process sends in a step to the experts of all, and what it answers to others' copies.

    Both as the mean over processes, which depends on the routers. Of it, each process keeps a share for its own
    experts: about 1 / n among n processes that divide them.

    Args:
        shape: Of the model.
        mode: How it is trained.
        num_tokens: Of its forward and backward passes.
        num_scoring_tokens: Of its forward passes alone.
    """
    if mode.num_expert_shards == 1:
        return 0.0
    copy = mode.weight_bytes * shape.hidden * shape.num_chosen_experts
    # There and back: forwards, once more where layers are computed again, and backwards.
    num_passes = (3 if mode.checkpoints_layers else 2) * num_tokens + num_scoring_tokens
    return 2.0 * (shape.num_layers - shape.num_dense_layers) * copy * num_passes


def _gathered_params(shape: ModelShape, mode: TrainingMode) -> float:
    """Of the model, those that several processes hold together: not of experts that each holds alone."""
    if mode.num_shards == 1:
        return 0.0
    num_alone = shape.expert_params if mode.num_shards == mode.num_expert_shards else 0.0
    return shape.divided(mode.num_expert_shards).num_params - num_alone / mode.num_expert_shards
