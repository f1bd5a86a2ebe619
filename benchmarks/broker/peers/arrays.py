"""Makes the arrays of a benchmark's trajectories. Uses numpy alone, since peers run in other environments."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_TEMPLATES = 32
NUM_PROMPT_TOKENS = 256

Arrays = dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]


def make_templates(num_tokens: int) -> list[Arrays]:
    """Arrays of trajectories of `num_tokens` response tokens: number n has the arrays n modulo NUM_TEMPLATES."""
    rng = np.random.default_rng(7)
    return [
        {
            "prompt_ids": rng.integers(0, 1 << 17, NUM_PROMPT_TOKENS, dtype=np.int32),
            "token_ids": rng.integers(0, 1 << 17, num_tokens, dtype=np.int32),
            "logprobs": -rng.random(num_tokens, dtype=np.float32),
            "advantages": rng.standard_normal(num_tokens, dtype=np.float32),
        }
        for _ in range(NUM_TEMPLATES)
    ]
