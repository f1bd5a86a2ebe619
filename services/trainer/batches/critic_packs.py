"""Packs on their way between a trainer and a critic of its own: only what a critic reads of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.errors import require
from penstock.v1 import critic_pb2
from penstock.wire.codec import float32_array, float32_bytes, int32_array, int32_bytes
from penstock.wire.pieces import MAX_CRITIC_PACK_TOKENS
from services.trainer.batches.packing import Pack


def encoded_pack(pack: Pack) -> critic_pb2.CriticPack:
    """What a critic reads of a pack."""
    return critic_pb2.CriticPack(
        token_ids=int32_bytes(pack.token_ids.astype(np.int32)),
        segment_lengths=pack.segment_lengths,
        target_positions=int32_bytes((pack.logit_positions + 1).astype(np.int32)),
        values=b"" if pack.values is None else float32_bytes(pack.values),
        returns=b"" if pack.returns is None else float32_bytes(pack.returns),
    )


def decoded_pack(
    message: critic_pb2.CriticPack, *, vocab_size: int, max_sequence_length: int, is_trained_on: bool
) -> Pack:
    """The pack in a message; what a critic does not read is zero.

    Args:
        message: From the network.
        vocab_size: Token ids must lie below.
        max_sequence_length: Of one sample.
        is_trained_on: Whether it must have values and returns.

    Raises:
        InvalidFieldError: It is not a pack, or not one for this model.
    """
    tokens = int32_array(message.token_ids, "pack.token_ids").astype(np.int64)
    most = MAX_CRITIC_PACK_TOKENS
    require(0 < tokens.size <= most, "pack.token_ids", tokens.size, f"1 to {most} tokens")
    worst = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
    require(0 <= worst < vocab_size, "pack.token_ids", worst, f"below {vocab_size}, this model's vocabulary")
    lengths = np.array(message.segment_lengths, dtype=np.int64)
    fits = bool(lengths.size and lengths.min() >= 2 and lengths.sum() == tokens.size)
    require(fits, "pack.segment_lengths", lengths[:8].tolist(), f"at least 2 each, {tokens.size} together")
    longest = int(lengths.max())
    require(longest <= max_sequence_length, "pack.segment_lengths", longest, f"at most {max_sequence_length} here")
    starts = np.cumsum(lengths) - lengths
    targets = int32_array(message.target_positions, "pack.target_positions").astype(np.int64)
    _check_targets(targets, starts, num_tokens=tokens.size)
    nothing = np.zeros(targets.size, dtype=np.float32)
    return Pack(
        token_ids=tokens,
        position_ids=np.arange(tokens.size, dtype=np.int64) - np.repeat(starts, lengths),
        segment_lengths=tuple(lengths.tolist()),
        logit_positions=targets - 1,
        target_ids=tokens[targets],
        target_segments=np.searchsorted(starts, targets, side="right") - 1,
        behavior_logprobs=nothing,
        advantages=nothing,
        members=tuple(range(lengths.size)),
        values=finite_floats(message.values, "pack.values", size=targets.size) if is_trained_on else None,
        returns=finite_floats(message.returns, "pack.returns", size=targets.size) if is_trained_on else None,
    )


def _check_targets(targets: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], *, num_tokens: int) -> None:
    is_ascending = bool(targets.size and targets[0] >= 0 and targets[-1] < num_tokens and (np.diff(targets) > 0).all())
    require(is_ascending, "pack.target_positions", targets[:8].tolist(), f"ascending, from 0 to {num_tokens - 1}")
    first = np.intersect1d(targets, starts)
    require(not first.size, "pack.target_positions", first[:8].tolist(), "none that begins a sample")


def finite_floats(data: bytes, field: str, *, size: int) -> npt.NDArray[np.float32]:
    """The float32[size] in `data`, all finite; raises InvalidFieldError."""
    array = float32_array(data, field)
    require(array.size == size, field, f"{array.size} numbers", f"{size}, one for each token that is trained on")
    require(bool(np.isfinite(array).all()), field, "not finite", "finite")
    return np.array(array)
