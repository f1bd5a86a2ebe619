"""Keeps vLLM's scheduler statistics as plain numbers, replacing its Prometheus logger, which costs time per token.

Imports vLLM, so import this only once the engine starts.
"""

from __future__ import annotations

import asyncio

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class StatsRecorder(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is untyped here
    """Keeps the latest statistics.

    Derives from vLLM's Prometheus logger because that is how vLLM recognises a replacement; no inherited code
    runs.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self.num_waiting = 0
        self.kv_cache_usage = 0.0
        self.num_preemptions = 0
        self.num_sampled_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.sampled = asyncio.Event()
        """Set after a step that sampled tokens; cleared by the waiter."""
        self._num_expected_preemptions = 0

    def expect_preemptions(self, num_samples: int) -> None:
        """Discount samples preempted on purpose; vLLM counts them like those preempted for lack of KV space."""
        self._num_expected_preemptions = num_samples

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after each step."""
        if scheduler_stats is not None:
            self.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._count_preemptions(iteration_stats.num_preempted_reqs)
            self.num_sampled_tokens += iteration_stats.num_generation_tokens
            self.num_prompt_tokens += iteration_stats.prompt_token_stats.total
            self.num_cached_tokens += iteration_stats.prompt_token_stats.cached_tokens
            if iteration_stats.num_generation_tokens:
                self.sampled.set()

    def log_engine_initialized(self) -> None:
        """Nothing to announce."""

    def log(self) -> None:
        """Nothing to print."""

    def _count_preemptions(self, num_samples: int) -> None:
        num_expected = min(num_samples, self._num_expected_preemptions)
        self._num_expected_preemptions -= num_expected
        self.num_preemptions += num_samples - num_expected
