"""Turns scoring leases into trajectories, and log-probs into results."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFieldError, require
from penstock.rewards.outcomes import clean_text
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import float32_bytes, int32_array
from services.trainer.batches.packing import Trajectory


def trajectory_of(lease: broker_pb2.ScoringLease, *, vocab_size: int, max_tokens: int) -> Trajectory:
    """The sample of a lease, every completion token a loss token.

    Raises:
        InvalidFieldError: It has no tokens, more than the model takes, or tokens that the model does not know.
    """
    prompt = int32_array(lease.prompt_token_ids, "prompt_token_ids")
    completion = int32_array(lease.item.token_ids, "item.token_ids")
    tokens = np.concatenate([prompt, completion])
    require(prompt.size > 0 and completion.size > 0, "item.token_ids", completion.size, "at least one, after a prompt")
    require(tokens.size <= max_tokens, "item.token_ids", f"{tokens.size} tokens", f"at most {max_tokens} in this model")
    largest = int(tokens.max())
    require(int(tokens.min()) >= 0 and largest < vocab_size, "item.token_ids", largest, f"below {vocab_size}")
    nothing = np.zeros(tokens.shape, dtype=np.float32)
    return Trajectory(
        token_ids=tokens,
        loss_mask=np.arange(tokens.size) >= prompt.size,
        behavior_logprobs=nothing,
        advantages=nothing,
        temperature=lease.temperature or 1.0,
        group_id=lease.item.key.group_id,
    )


def result_of(lease: broker_pb2.ScoringLease, logprobs: npt.NDArray[np.float32]) -> broker_pb2.ScoreResult:
    """The result with the log-probs of a completion, [C]; a failed one if they are not finite."""
    if not np.isfinite(logprobs).all():
        return failed_result(lease, InvalidFieldError("the model's log-probs are not finite"))
    return broker_pb2.ScoreResult(
        lease_id=lease.lease_id, key=lease.item.key, reference_logprobs=float32_bytes(logprobs)
    )


def failed_result(lease: broker_pb2.ScoringLease, error: Exception) -> broker_pb2.ScoreResult:
    """The result that drops a sample, with the reason."""
    score = types_pb2.Score(status=types_pb2.SCORE_STATUS_FAILED, message=clean_text(error))
    return broker_pb2.ScoreResult(lease_id=lease.lease_id, key=lease.item.key, score=score)
