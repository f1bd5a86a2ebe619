"""Hashes n-grams of prompts: which words and pairs of neighbours occur, and how often. Pure.

Source: Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning"; without its sign, because a model
keeps only a few buckets. Values are log(1 + count). Buckets are part of saved models: FORMAT changes when the hash
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.lengths.prompt_features import PromptView

FORMAT = 1
NUM_BUCKETS = 1 << 17

_Ints = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ngrams:
    """Prompts as a sparse matrix with one row per prompt, entries [num_entries] in row order."""

    num_rows: int
    rows: _Ints
    buckets: _Ints
    values: Floats
    lengths: Floats
    """log(1 + prompt tokens), [num_rows]."""


def ngrams(prompts: Sequence[PromptView]) -> Ngrams:
    """The n-grams of some prompts."""
    sizes = np.array([len(prompt.words) for prompt in prompts], dtype=np.int64)
    words = np.concatenate([prompt.words for prompt in prompts] or [np.zeros(0, np.uint32)]).astype(np.uint64)
    rows = np.repeat(np.arange(len(prompts)), sizes)
    singles = _mixed(words + np.uint64(1 << 40))
    pairs = _mixed(words[:-1] * np.uint64(0x9E3779B97F4A7C15) + words[1:])
    is_pair = rows[:-1] == rows[1:]
    all_rows = np.concatenate([rows, rows[:-1][is_pair]])
    buckets = np.concatenate([singles, pairs[is_pair]]) % np.uint64(NUM_BUCKETS)
    entries, counts = np.unique(all_rows * NUM_BUCKETS + buckets.astype(np.int64), return_counts=True)
    return Ngrams(
        num_rows=len(prompts),
        rows=entries // NUM_BUCKETS,
        buckets=entries % NUM_BUCKETS,
        values=np.log1p(counts.astype(np.float64)),
        lengths=np.log1p(np.array([prompt.num_tokens for prompt in prompts], dtype=np.float64)),
    )


def _mixed(values: _Hashes) -> _Hashes:
    """The finaliser of SplitMix64 (Steele et al. 2014); overflow is intended."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
