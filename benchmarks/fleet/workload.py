"""Makes the samples of one step from a seed: StreamRL's lengths, and a ranker's forecasts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.v1 import types_pb2
from penstock.wire.codec import int32_bytes
from services.generator.emulation.length_law import STREAMRL_BIN_TOKENS, STREAMRL_FIRST_TOKENS, STREAMRL_HISTOGRAM

VOCAB_SIZE = 4_096
NUM_PROMPT_TOKENS = 128
MAX_NEW_TOKENS = 20_480
STOP_TOKEN_ID = 0
RANKER_SIGMA = 0.25
"""Standard deviation of the logarithm of forecast over length: as good as StreamRL's rankers (the result has the
recall)."""
TAIL_SHARES = (0.2, 0.1, 0.05)
_SAME_TOKEN_IDS = int32_bytes(np.arange(1, NUM_PROMPT_TOKENS + 1) % 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sample i has length i."""

    lengths: Sequence[int]
    forecasts: dict[str, Sequence[float | None]]
    """Forecasts by source: `oracle`, `ranker`, `none`."""
    prompt_token_ids: Sequence[bytes] | None = None
    """Token ids, int32[] each; unset gives all prompts the same tokens, from which nothing is learned."""

    def write_lengths(self, path: Path) -> None:
        """Lengths for the emulated engines to replay."""
        path.write_text("".join(f"{length}\n" for length in self.lengths), encoding="utf-8")

    def prompts(self, indices: Sequence[int]) -> list[types_pb2.Prompt]:
        """Prompts whose single samples replay the lengths of these indices."""
        return [
            types_pb2.Prompt(
                group_id=group_id(index),
                token_ids=self.prompt_token_ids[index] if self.prompt_token_ids is not None else _SAME_TOKEN_IDS,
                group_size=1,
                sampling=types_pb2.SamplingParams(
                    max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=index, stop_token_ids=[STOP_TOKEN_ID]
                ),
                purpose=types_pb2.PURPOSE_TRAIN,
            )
            for index in indices
        ]


def recall(lengths: Sequence[int], forecasts: Sequence[float | None], share: float) -> float:
    """Share of the longest `share` of the samples that the forecasts rank among the longest."""
    count = max(1, round(share * len(lengths)))
    true = set(np.argsort(lengths)[-count:].tolist())
    said = set(np.argsort(np.asarray(forecasts, float))[-count:].tolist())
    return len(true & said) / count


def make_workload(*, num_samples: int, scale: float, seed: int) -> Workload:
    """Lengths of the histogram times `scale`."""
    rng = np.random.default_rng(seed)
    weights = np.asarray(STREAMRL_HISTOGRAM)
    places = rng.choice(len(weights), size=num_samples, p=weights / weights.sum()) + rng.random(num_samples)
    lengths = np.maximum(1, np.round(scale * (STREAMRL_FIRST_TOKENS + STREAMRL_BIN_TOKENS * places))).astype(int)
    noisy = lengths * rng.lognormal(0.0, RANKER_SIGMA, num_samples)
    return Workload(
        lengths=lengths.tolist(),
        forecasts={
            "oracle": lengths.astype(float).tolist(),
            "ranker": noisy.tolist(),
            "none": [None] * num_samples,
        },
    )


def group_id(index: int) -> str:
    """The group of sample `index`."""
    return f"s{index}"
