"""The input of passes that only serve to run a model: for processes without work of their own, and for measurements."""

from __future__ import annotations

import numpy as np

from services.trainer.batches.packing import Pack, Trajectory, join

IDLE_TOKENS = 8


def idle_pack(vocab_size: int) -> Pack:
    """A few tokens that all models of this vocabulary, including a critic, can take."""
    nothing = np.zeros(IDLE_TOKENS, dtype=np.float32)
    trajectory = Trajectory(
        token_ids=(np.arange(IDLE_TOKENS, dtype=np.int32) * 7 + 3) % np.int32(vocab_size),
        loss_mask=np.arange(IDLE_TOKENS) > 0,
        behavior_logprobs=nothing,
        advantages=nothing,
        values=nothing,
        returns=nothing,
        reference_logprobs=nothing,
    )
    return join([trajectory], [0])
