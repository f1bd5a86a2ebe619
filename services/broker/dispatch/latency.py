"""Models how long generators take, for every policy but `fifo`. Pure.

A decode step of n samples that hold k KV tokens together takes

    step_s(n, k) = base_s + n * per_sample_s + k * per_kv_token_s

and gives each of them one token. Samples with r_i tokens to go and c_i tokens of context that run together therefore
all end after

    base_s * max(r_i) + per_sample_s * sum(r_i) + per_kv_token_s * sum(r_i * c_i + r_i^2 / 2)

(sum over i of per_sample_s for each step that sample i takes part in, and so for its KV tokens), where max(r_i) becomes
sum(r_i) / max_samples when that is more: the samples then take turns. Adding a sample to the sums is one addition,
so a policy may try many placements.

Source: StreamRL (Zhong et al. 2025), section 5.1, Eq. (1) and (2), with the curve of its Figure 6 made a line and KV
reads added. Difference: Eq. (2) multiplies the mean length by whole rounds; here the longest sample ends a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.batching.step_times import LinearSteps
from penstock.v1 import broker_pb2

DEFAULT_BASE_S = 0.0085
DEFAULT_PER_SAMPLE_S = 0.000055
"""Least squares through StreamRL's Figure 6 (8.3 ms a token alone, 36.9 ms at 512 samples), for unknown generators."""
UNKNOWN_MAX_SAMPLES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel(LinearSteps):
    """One generator's speed and capacity."""

    base_s: float = DEFAULT_BASE_S
    per_sample_s: float = DEFAULT_PER_SAMPLE_S
    max_samples: int = UNKNOWN_MAX_SAMPLES
    """Most samples decoded at once."""
    kv_capacity_tokens: int | None = None
    """None if the KV cache is unbounded or unknown."""

    @classmethod
    def from_profile(cls, profile: broker_pb2.GeneratorProfile) -> LatencyModel:
        """A generator's stated profile; the default curve if it states none."""
        knows_step = profile.step_base_s > 0 or profile.step_per_sample_s > 0
        return cls(
            base_s=profile.step_base_s if knows_step else DEFAULT_BASE_S,
            per_sample_s=profile.step_per_sample_s if knows_step else DEFAULT_PER_SAMPLE_S,
            per_kv_token_s=profile.step_per_kv_token_s,
            prefill_tokens_per_second=profile.prefill_tokens_per_second or None,
            max_samples=profile.max_concurrent_samples or UNKNOWN_MAX_SAMPLES,
            kv_capacity_tokens=profile.kv_capacity_tokens or None,
        )

    def max_batch(self, tokens_per_sample: float) -> int:
        """Most samples of this many tokens (context and completion) decoded at once, at least 1."""
        if self.kv_capacity_tokens is None or tokens_per_sample <= 0:
            return self.max_samples
        return max(1, min(self.max_samples, int(self.kv_capacity_tokens / tokens_per_sample)))


@dataclass(slots=True, kw_only=True)
class Load:
    """A generator's load, as the sums of the model."""

    model: LatencyModel
    max_samples: int
    """Most samples it should hold: slots and KV headroom."""
    max_leases: int
    """Number of leases it may get now."""
    max_context_tokens: float = float("inf")
    num_samples: int = 0
    longest_tokens: float = 0.0
    shortest_tokens: float = 0.0
    """Remaining tokens of the next sample to end; 0 if it holds none."""
    sum_tokens: float = 0.0
    sum_kv_tokens: float = 0.0
    """Sum over the samples of KV tokens read in all remaining steps."""

    @property
    def room(self) -> int:
        """Number of samples it may get now."""
        return max(0, min(self.max_leases, self.max_samples - self.num_samples))

    def copy(self) -> Load:
        """A copy, to try placements on."""
        # Not `replace`, which takes four times as long; every decision copies every load.
        return Load(
            model=self.model,
            max_samples=self.max_samples,
            max_leases=self.max_leases,
            max_context_tokens=self.max_context_tokens,
            num_samples=self.num_samples,
            longest_tokens=self.longest_tokens,
            shortest_tokens=self.shortest_tokens,
            sum_tokens=self.sum_tokens,
            sum_kv_tokens=self.sum_kv_tokens,
        )

    def add(self, remaining_tokens: float, context_tokens: float, count: int = 1) -> None:
        """Give it samples; uses up leases."""
        self.shortest_tokens = min(self.shortest_tokens, remaining_tokens) if self.num_samples else remaining_tokens
        self.longest_tokens = max(self.longest_tokens, remaining_tokens)
        self.num_samples += count
        self.max_leases -= count
        self.sum_tokens += count * remaining_tokens
        self.sum_kv_tokens += count * kv_reads(remaining_tokens, context_tokens)

    def resize(self, num_samples: int, mean_tokens: float) -> None:
        """Assume another number of samples of the same lengths; of the mean length if it held none."""
        count = self.num_samples
        self.max_leases += count - num_samples
        if count and num_samples:
            self.num_samples = num_samples
            self.sum_tokens *= num_samples / count
            self.sum_kv_tokens *= num_samples / count
            return
        self.num_samples, self.longest_tokens, self.shortest_tokens = 0, 0.0, 0.0
        self.sum_tokens = self.sum_kv_tokens = 0.0
        if num_samples:
            self.add(mean_tokens, 0.0, num_samples)
            self.max_leases += num_samples

    def finish_s(self, remaining_tokens: float = 0.0, context_tokens: float = 0.0, *, risk: float = 1.0) -> float:
        """When everything it holds, and one more sample if given, will be done: seconds from now.

        `risk` is the factor by which the added sample may exceed its forecast; it may then outlast the others.
        """
        model = self.model
        sum_tokens = self.sum_tokens + remaining_tokens
        num_steps = max(self.longest_tokens, remaining_tokens * risk, sum_tokens / self.max_samples)
        finish_s = model.base_s * num_steps + model.per_sample_s * sum_tokens
        if model.per_kv_token_s:
            finish_s += model.per_kv_token_s * (self.sum_kv_tokens + kv_reads(remaining_tokens, context_tokens))
        return finish_s

    def sample_s(self, remaining_tokens: float, context_tokens: float) -> float:
        """Latest finish of one more sample, begun now beside its other samples."""
        mean_kv = self.sum_kv_tokens / self.sum_tokens * self.num_samples if self.sum_tokens else 0.0
        kv_tokens = mean_kv + context_tokens + remaining_tokens / 2
        step_s = self.model.step_s(min(self.num_samples + 1, self.max_samples), kv_tokens)
        return self.model.prefill_s(context_tokens) + min(
            remaining_tokens * step_s, max(self.finish_s(remaining_tokens, context_tokens), 0.0)
        )

    def later_s(self, remaining_tokens: float, context_tokens: float) -> float:
        """When a sample would be done that waits for the next slot here."""
        wait_s = 0.0 if self.room else self.shortest_tokens * self.model.step_s(self.num_samples)
        return wait_s + self.sample_s(remaining_tokens, context_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Rate with every slot filled."""
        return self.max_samples / self.model.step_s(self.max_samples)


def kv_reads(remaining_tokens: float, context_tokens: float) -> float:
    """KV tokens that a generator reads for a sample until it is done."""
    return remaining_tokens * (context_tokens + remaining_tokens / 2)


def level_s(loads: Iterable[Load], num_tokens: float) -> float:
    """When these generators would finish their load and `num_tokens` more, shared so that all end together.

    Infinite if there are none.
    """
    slopes = sorted((load.finish_s(), load.tokens_per_second) for load in loads)
    if not slopes:
        return float("inf")
    rate, poured = 0.0, 0.0
    for index, (finish_s, tokens_per_second) in enumerate(slopes):
        if index and num_tokens <= rate * finish_s - poured:
            break
        rate += tokens_per_second
        poured += tokens_per_second * finish_s
    return (num_tokens + poured) / rate


def token_s(load: Load) -> float:
    """Time per token in a small batch, to compare generators by."""
    return load.model.step_s(min(8, load.max_samples))
