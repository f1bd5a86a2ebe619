"""How long a decode step and a prefill take: a straight line, or a measured table. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

STREAMRL_TABLE: Mapping[int, float] = {
    **{1: 0.0083, 2: 0.0087, 4: 0.0089, 8: 0.0090, 16: 0.0094},
    **{32: 0.0102, 64: 0.0116, 128: 0.0152, 256: 0.0218, 512: 0.0369},
}
"""StreamRL (Zhong et al. 2025), Figure 6: seconds of a decode step by batch size, a 7B model on one H800 with vLLM."""

_FIT_KV_TOKENS = 4096


class StepTimes(Protocol):
    """Times of a GPU."""

    def step_s(self, num_samples: int, kv_tokens: float) -> float:
        """A decode step of that many samples, which together hold that many KV tokens."""

    def prefill_s(self, num_tokens: int) -> float:
        """Making the KV cache of that many tokens of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefillRate:
    prefill_tokens_per_second: float | None = None
    """None when prefill costs next to nothing, or is unknown."""

    def prefill_s(self, num_tokens: float) -> float:
        """See `StepTimes`."""
        return num_tokens / self.prefill_tokens_per_second if self.prefill_tokens_per_second else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSteps(_PrefillRate):
    """base + n * per sample + k * per KV token. Raises ValueError where a step would take no time."""

    base_s: float = 0.0
    per_sample_s: float = 0.0
    per_kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what would stand still or never end."""
        if self.base_s < 0 or self.per_sample_s < 0 or self.base_s + self.per_sample_s + self.per_kv_token_s <= 0:
            raise ValueError("a decoding step must take some time")

    def step_s(self, num_samples: int, kv_tokens: float = 0.0) -> float:
        """See `StepTimes`."""
        return self.base_s + num_samples * self.per_sample_s + kv_tokens * self.per_kv_token_s

    def scaled(self, factor: float) -> Self:
        """The same shape, every step `factor` times as long: how a measured rate corrects a stated profile."""
        return replace(
            self,
            base_s=self.base_s * factor,
            per_sample_s=self.per_sample_s * factor,
            per_kv_token_s=self.per_kv_token_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSteps(_PrefillRate):
    """Measured steps by batch size, straight between two of them; the last two go on for ever."""

    table: Mapping[int, float]
    """At least two batch sizes; seconds."""
    slowdown: float = 1.0
    _sizes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Refuses a table that says too little or stands still."""
        if len(self.table) < 2 or min(self.table) < 1 or min(self.table.values()) <= 0 or self.slowdown <= 0:
            raise ValueError("a table of steps needs two batch sizes of at least 1 and positive seconds")
        object.__setattr__(self, "_sizes", tuple(sorted(self.table)))

    def step_s(self, num_samples: int, kv_tokens: float) -> float:
        """See `StepTimes`; KV tokens are in the table already, at whatever context it was measured with."""
        sizes = self._sizes
        if num_samples <= sizes[0]:
            return self.slowdown * self.table[sizes[0]]
        high = min(bisect.bisect_left(sizes, num_samples), len(sizes) - 1)
        low_size, high_size = sizes[high - 1], sizes[high]
        low_s, high_s = self.table[low_size], self.table[high_size]
        share = (num_samples - low_size) / (high_size - low_size)
        return self.slowdown * (low_s + share * (high_s - low_s))


def line_through(steps: StepTimes, *, max_samples: int) -> LinearSteps:
    """What a profile can say of any step times: exact at one sample and at `max_samples`, straight between them."""
    alone_s, full_s = steps.step_s(1, 0.0), steps.step_s(max(2, max_samples), 0.0)
    per_sample_s = max(0.0, (full_s - alone_s) / (max(2, max_samples) - 1))
    prefill_s = steps.prefill_s(_FIT_KV_TOKENS)
    return LinearSteps(
        base_s=max(0.0, alone_s - per_sample_s),
        per_sample_s=per_sample_s,
        per_kv_token_s=(steps.step_s(1, _FIT_KV_TOKENS) - alone_s) / _FIT_KV_TOKENS,
        prefill_tokens_per_second=_FIT_KV_TOKENS / prefill_s if prefill_s else None,
    )
