"""Soft penalty for answers that approach the length limit (DAPO)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def overlong_penalties(
    num_tokens: npt.NDArray[np.int64], *, max_tokens: npt.NDArray[np.int64], buffer_tokens: int
) -> npt.NDArray[np.float64]:
    """The reward penalty for samples of these lengths, float64[G]: 0 down to -1.

    Nothing up to `max_tokens - buffer_tokens`, from there linearly to -1 at `max_tokens`.

    Args:
        num_tokens: int64[G], completion tokens.
        max_tokens: int64[G], maximum completion tokens of their sampling.
        buffer_tokens: How long before that the penalty begins; 0 penalises nothing.

    Raises:
        ValueError: `buffer_tokens` does not lie in [0, min(max_tokens)].

    Source: DAPO (arXiv 2503.14476) eq. 13.
    """
    if buffer_tokens == 0:
        return np.zeros(num_tokens.shape)
    least = int(max_tokens.min())
    if not 0 <= buffer_tokens <= least:
        raise ValueError(f"overlong_buffer_tokens must lie in [0, {least}], not {buffer_tokens}")
    over = num_tokens.astype(np.float64) - (max_tokens - buffer_tokens)
    penalties: npt.NDArray[np.float64] = -np.clip(over / buffer_tokens, 0.0, 1.0)
    return penalties
