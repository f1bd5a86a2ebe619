"""How long a decode step and a prefill take: a straight line, a measured table, or the roofline of a GPU. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.generator.emulation.hardware import Gpu, ModelShape

STREAMRL_TABLE: Mapping[int, float] = {
    **{1: 0.0083, 2: 0.0087, 4: 0.0089, 8: 0.0090, 16: 0.0094},
    **{32: 0.0102, 64: 0.0116, 128: 0.0152, 256: 0.0218, 512: 0.0369},
}
"""StreamRL (Zhong et al. 2025), Figure 6: seconds of a decode step by batch size, a 7B model on one H800 with vLLM."""

_FIT_KV_TOKENS = 4096


class StepTimes(Protocol):
    """Times of a pretend GPU."""

    def step_s(self, num_samples: int, kv_tokens: float) -> float:
        """A decode step of so many samples that together hold so many KV tokens."""

    def prefill_s(self, num_tokens: int) -> float:
        """Making the KV cache of so many tokens of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSteps:
    """base + n * per sample; prefill costs nothing. Raises ValueError where a step would take no time."""

    base_s: float = 0.0
    per_sample_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what would stand still or never end."""
        if self.base_s < 0 or self.per_sample_s < 0 or self.base_s + self.per_sample_s <= 0:
            raise ValueError("a decoding step must take some time")

    def step_s(self, num_samples: int, kv_tokens: float) -> float:
        """See `StepTimes`; KV tokens cost nothing."""
        return self.base_s + num_samples * self.per_sample_s

    def prefill_s(self, num_tokens: int) -> float:
        """See `StepTimes`."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSteps:
    """Measured steps by batch size, straight between two of them; the last two go on for ever."""

    table: Mapping[int, float]
    """At least two batch sizes; seconds."""
    slowdown: float = 1.0
    prefill_tokens_per_second: float | None = None
    """None: prefill costs nothing."""
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

    def prefill_s(self, num_tokens: int) -> float:
        """See `StepTimes`."""
        return num_tokens / self.prefill_tokens_per_second if self.prefill_tokens_per_second else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on GPUs that share it by tensor parallelism: bytes over bandwidth against FLOPs over rate.

        step = max( (weights + KV read) / bandwidth,  (products + attention) / rate ) + overhead + all-reduces

    Two all-reduces a layer, of hidden_size elements a sample, where there is more than one GPU. The share of the data
    sheet's bandwidth and rate that is reached, and the overhead of a step, are fits to published measurements (vLLM and
    TensorRT-LLM on A100, H100, H800: 0.7 to 0.8 of bandwidth, 0.4 to 0.77 of rate). With 2,500 tokens of
    context it is within 7 % of StreamRL's table for a 7B model on an H800, at every batch size.
    """

    gpu: Gpu
    model: ModelShape
    num_gpus: int = 1
    slowdown: float = 1.0
    bandwidth_share: float = 0.75
    decode_flops_share: float = 0.6
    prefill_flops_share: float = 0.65
    overhead_s: float = 0.002
    memory_share: float = 0.9
    """Of the memory that the engine may take."""
    reserved_bytes: float = 2e9
    """Of each GPU, for activations and the runtime."""

    def __post_init__(self) -> None:
        """Refuses a model that does not fit."""
        if self.num_gpus < 1 or self.slowdown <= 0:
            raise ValueError("num_gpus must be at least 1, slowdown positive")
        if self.kv_capacity_tokens < 1:
            needed, offered = self.model.weight_bytes / 1e9, self._usable_bytes / 1e9
            raise ValueError(f"the model's {needed:.0f} GB of weights leave no KV room in {offered:.0f} GB; add GPUs")

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV cache fits beside the weights."""
        return int((self._usable_bytes - self.model.weight_bytes) / self._kv_token_bytes)

    def step_s(self, num_samples: int, kv_tokens: float) -> float:
        """See `StepTimes`."""
        gpu, model = self.gpu, self.model
        read_bytes = model.weight_bytes + kv_tokens * self._kv_token_bytes
        memory_s = read_bytes / (self.num_gpus * gpu.memory_bytes_per_second * self.bandwidth_share)
        flops = num_samples * model.flops_per_token + kv_tokens * model.attention_flops_per_kv_token
        compute_s = flops / (self.num_gpus * gpu.flops_per_second * self.decode_flops_share)
        return self.slowdown * (max(memory_s, compute_s) + self.overhead_s + self._all_reduce_s(num_samples))

    def prefill_s(self, num_tokens: int) -> float:
        """See `StepTimes`; attention sees half of the square, for it is causal."""
        model = self.model
        flops = num_tokens * (model.flops_per_token + num_tokens * model.attention_flops_per_kv_token / 2)
        return self.slowdown * flops / (self.num_gpus * self.gpu.flops_per_second * self.prefill_flops_share)

    @property
    def _usable_bytes(self) -> float:
        return self.num_gpus * (self.memory_share * self.gpu.memory_bytes - self.reserved_bytes)

    @property
    def _kv_token_bytes(self) -> float:
        """Over all GPUs; more of them than KV heads hold copies."""
        return self.model.kv_token_bytes * max(1.0, self.num_gpus / self.model.num_kv_heads)

    def _all_reduce_s(self, num_samples: int) -> float:
        if self.num_gpus == 1:
            return 0.0
        sent_bytes = 2 * (1 - 1 / self.num_gpus) * num_samples * self.model.hidden_size * self.model.element_bytes
        once_s = self.gpu.link_latency_s + sent_bytes / self.gpu.link_bytes_per_second
        return 2 * self.model.num_layers * once_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A decode step as base + n * per sample + k * per KV token, and the rate of prefill."""

    base_s: float
    per_sample_s: float
    per_kv_token_s: float
    prefill_tokens_per_second: float | None


def line_through(steps: StepTimes, *, max_samples: int) -> Line:
    """What a profile can say of any step times: exact at one sample and at `max_samples`, straight between them."""
    alone_s, full_s = steps.step_s(1, 0.0), steps.step_s(max(2, max_samples), 0.0)
    per_sample_s = max(0.0, (full_s - alone_s) / (max(2, max_samples) - 1))
    per_kv_token_s = (steps.step_s(1, _FIT_KV_TOKENS) - alone_s) / _FIT_KV_TOKENS
    prefill_s = steps.prefill_s(_FIT_KV_TOKENS)
    return Line(
        base_s=max(0.0, alone_s - per_sample_s),
        per_sample_s=per_sample_s,
        per_kv_token_s=per_kv_token_s,
        prefill_tokens_per_second=_FIT_KV_TOKENS / prefill_s if prefill_s else None,
    )
