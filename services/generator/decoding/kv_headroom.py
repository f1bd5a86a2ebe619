"""How many more samples the KV cache can take: credit by measured KV pressure instead of a fixed number.

Samples grow. The running ones are projected forward by the survival of lengths seen so far, one token of each per
step; the cache takes one more if the projected peak still fits with it:

    max over steps k of   E[tokens held after k steps] + margin * standard deviation   <=   capacity

- Before anything has finished, every sample is assumed to reach its limit; so the first samples are few, and more are
  requested as lengths become known.
- A prompt shared inside a group counts by the share of it that the cache was measured to hold.
- The margin adapts: it grows with each preemption and shrinks with each sample that ended without
  one, so that MAX_PREEMPTED_SHARE of the samples are preempted or fewer.

Pure: no clock, no engine. Source: the demand ahead is that of the Past-Future scheduler (arXiv 2507.10150).
Differences: survival is estimated with running samples as censored ones, expectation and variance take the place of
draws, and the margin adapts (as in adaptive conformal inference, arXiv 2106.00170, equation 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.generator.decoding.survival import survival
from services.generator.engine.engine import EngineStats

MAX_PREEMPTED_SHARE = 0.02
"""Preemptions aimed at, of finished samples."""
MAX_MARGIN = 4.0
"""Standard deviations; beyond this the lengths have shifted, and will soon be known better."""
_FIRST_MARGIN = 2.0
_MARGIN_STEP = 0.25
_SHARING_STEP = 0.1
NUM_REMEMBERED = 1024
"""Number of recent samples to learn lengths from: the policy changes, and its lengths with it."""
_NUM_BINS = 512
_NUM_STEPS_AHEAD = 64

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSample:
    """A sample that has begun."""

    num_prompt_tokens: int
    num_new_tokens: int
    """Completion tokens so far."""
    max_new_tokens: int


class KvHeadroom:
    """See the module.

    Args:
        capacity_tokens: KV capacity; None if the engine states none: then only its slots bound it.
        block_tokens: A sample's cache grows by this many tokens at a time.
    """

    def __init__(self, capacity_tokens: int | None, *, block_tokens: int = 1) -> None:
        self._capacity_tokens = capacity_tokens
        self._block_tokens = block_tokens
        self._finished: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self.margin = _FIRST_MARGIN
        """Standard deviations kept free."""
        self._prompt_share = 1.0
        self._mean_prompt_tokens = 0.0
        self._max_new_tokens = 1
        self._num_preemptions = 0

    def note_begun(self, sample: RunningSample) -> None:
        """A sample begins. Recorded here, since short ones may end before `num_more` is next asked."""
        self._learn_limits([sample])

    def note_finished(self, num_new_tokens: int) -> None:
        """A completion ended by itself or at its limit, after this many tokens."""
        self._finished.append(num_new_tokens)
        self._move_margin(-MAX_PREEMPTED_SHARE)

    def note_load(self, held: Sequence[RunningSample], stats: EngineStats) -> None:
        """The load of the engine, which decodes these samples."""
        self.note_preemptions(stats.num_preemptions)
        if not stats.num_waiting:
            self.note_usage(held, stats.kv_cache_usage)

    def note_preemptions(self, num_preemptions: int) -> None:
        """The engine's count since its start."""
        self._move_margin(max(0, num_preemptions - self._num_preemptions))
        self._num_preemptions = num_preemptions

    def note_usage(self, held: Sequence[RunningSample], kv_cache_usage: float) -> None:
        """The tokens that the cache holds of these samples, all being decoded; shows how far prompts are shared."""
        num_prompt_tokens = sum(sample.num_prompt_tokens for sample in held)
        if not num_prompt_tokens or self._capacity_tokens is None:
            return
        rounded = sum(self._round_up(sample.num_prompt_tokens + sample.num_new_tokens) for sample in held)
        num_used = kv_cache_usage * self._capacity_tokens
        share = (num_used - (rounded - num_prompt_tokens)) / num_prompt_tokens
        self._prompt_share += _SHARING_STEP * (min(1.0, max(0.0, share)) - self._prompt_share)

    def num_more(self, held: Sequence[RunningSample], *, most: int) -> int:
        """Samples that may start beside these, at most `most`; at least one if nothing is held."""
        self._learn_limits(held)
        if most <= 0 or self._capacity_tokens is None:
            return max(0, most)
        # A guess of the first sample's size is worthless: start one and see.
        if not held and not self._mean_prompt_tokens:
            return 1
        ahead = _Ahead(
            held,
            finished=np.fromiter(self._finished, np.int64),
            max_new_tokens=self._max_new_tokens,
            new_prompt_tokens=self._mean_prompt_tokens,
            prompt_share=self._prompt_share,
            block_tokens=self._block_tokens,
        )
        least, beyond = 0, most + 1
        while beyond - least > 1:
            middle = (least + beyond) // 2
            if ahead.peak_tokens(middle, margin=self.margin) <= self._capacity_tokens:
                least = middle
            else:
                beyond = middle
        return max(least, 0 if held else 1)

    def _learn_limits(self, held: Sequence[RunningSample]) -> None:
        if held:
            self._mean_prompt_tokens = sum(sample.num_prompt_tokens for sample in held) / len(held)
            self._max_new_tokens = max(sample.max_new_tokens for sample in held)

    def _move_margin(self, error: float) -> None:
        self.margin = min(MAX_MARGIN, max(0.0, self.margin + _MARGIN_STEP * error))

    def _round_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens) * self._block_tokens


class _Ahead:
    """Tokens held in coming steps; lengths fall into bins, axes in names: b bins, k steps ahead."""

    def __init__(
        self,
        held: Sequence[RunningSample],
        *,
        finished: npt.NDArray[np.int64],
        max_new_tokens: int,
        new_prompt_tokens: float,
        prompt_share: float,
        block_tokens: int,
    ) -> None:
        self._bin_tokens = -(-max_new_tokens // _NUM_BINS)
        self._block_tokens = block_tokens
        reached = self._bins([sample.num_new_tokens for sample in held])
        # [b]: share of samples that get as far as the bin; none gets beyond the last.
        self._reaches_b = np.concatenate([[1.0], survival(self._bins(finished), reached, _NUM_BINS)[:-1], [0.0]])
        self._steps_k = np.unique(np.geomspace(1, _NUM_BINS, _NUM_STEPS_AHEAD).astype(np.int64)) - 1
        num_b = np.bincount(reached, minlength=_NUM_BINS).astype(np.float64)
        prompts_b = np.bincount(reached, [sample.num_prompt_tokens for sample in held], minlength=_NUM_BINS)
        occupied = np.flatnonzero(num_b)
        mean_prompts = prompt_share * prompts_b[occupied] / num_b[occupied]
        means, variances = self._per_sample(occupied, mean_prompts)
        self._mean_k, self._variance_k = num_b[occupied] @ means, num_b[occupied] @ variances
        new_means, new_variances = self._per_sample(np.zeros(1, np.int64), np.array([prompt_share * new_prompt_tokens]))
        self._new_mean_k, self._new_variance_k = new_means[0], new_variances[0]

    def peak_tokens(self, num_new: int, *, margin: float) -> float:
        """The most tokens held at any step ahead, with this many samples started now."""
        mean_k = self._mean_k + num_new * self._new_mean_k
        variance_k = self._variance_k + num_new * self._new_variance_k
        return float((mean_k + margin * np.sqrt(variance_k)).max())

    def _bins(self, num_tokens: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.minimum(np.asarray(num_tokens, np.int64) // self._bin_tokens, _NUM_BINS - 1)

    def _per_sample(self, reached: npt.NDArray[np.int64], prompts: Floats) -> tuple[Floats, Floats]:
        """Mean and variance of the tokens that one sample in each of these bins holds, [len(reached), k]."""
        then = np.minimum(reached[:, None] + self._steps_k, _NUM_BINS)
        alive = self._reaches_b[then] / self._reaches_b[reached][:, None]
        tokens = prompts[:, None] + (then + 0.5) * self._bin_tokens
        tokens = np.ceil(tokens / self._block_tokens) * self._block_tokens
        return alive * tokens, alive * (1.0 - alive) * tokens**2
