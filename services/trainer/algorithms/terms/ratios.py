"""Probability ratios from log-probs, and means over the samples of a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is finite in float32, and a token this far off has no use."""


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """`exp` of log-ratios clamped to +-MAX_LOG_RATIO."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def num_segments(segments: Tensor) -> int:
    """Samples of a pack: one more than the highest number; 0 for an empty pack."""
    return int(segments.max()) + 1 if segments.numel() else 0


def segment_sums(values: Tensor, segments: Tensor) -> Tensor:
    """Sums of [N] values by sample, [S]; a sample without loss tokens gets 0."""
    return values.new_zeros(num_segments(segments)).index_add(0, segments, values)


def segment_counts(segments: Tensor, like: Tensor) -> Tensor:
    """Loss tokens of each sample, [S], in the type of `like`, at least 1 so that one may divide by it."""
    return segment_sums(like.new_ones(segments.shape), segments).clamp(min=1.0)
