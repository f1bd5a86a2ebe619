"""Compares concurrency by measured KV pressure with fixed settings, on a real vLLM engine with a small KV cache.

A separate process: `python -m benchmarks.generator.kv_pressure MODEL_DIR RESULT.json PLAN_JSON`.

One engine decodes the same samples under each setting, one setting after the other, as often as the plan says, so that
other work on the machine affects all of them. Each starts with an empty engine and is counted from the end of a quarter
of its samples until the last one starts; the rule keeps what it learned in earlier repetitions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.broker.processes import cpu_s
from benchmarks.generator.concurrency import BEAT_S, MAX_SAMPLES, WARM_UP_SHARE
from benchmarks.generator.model import VOCAB_SIZE
from penstock.process.bound_child import end_group_with_parent
from services.generator.decoding.kv_headroom import KvHeadroom, RunningSample
from services.generator.engine.engine import EngineStats, GenerateRequest, SamplingSettings
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine

PROMPT_TOKENS = 100
MEAN_TOKENS, LENGTH_SIGMA, MAX_TOKENS = 200.0, 0.6, 900
MAX_CONTEXT = PROMPT_TOKENS + MAX_TOKENS
WINDOW_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePlan:
    """How much to measure."""

    fixed_settings: tuple[int, ...]
    """Numbers of concurrent samples."""
    num_repetitions: int
    num_samples: int
    """Samples of each setting in each repetition."""
    kv_cache_gib: float
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureWindow:
    """One repetition of a setting."""

    fixed: int | None
    """Fixed concurrency; None uses the rule's."""
    tokens_per_second: float
    tokens_per_cpu_second: float
    """Rate over the CPU time of this process and the engine: the number least affected by other work on the machine."""
    preempted_share: float
    """Preemptions per sample."""
    mean_samples: float
    """Concurrent samples, averaged over the heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    cpu_s: float
    num_tokens: int
    num_preemptions: int
    num_begun: int


class _OwnPreemptions:
    """The engine as the rule sees it: without preemptions caused by the fixed settings."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.num_others = 0

    def stats(self) -> EngineStats:
        """Its load."""
        stats = self._engine.stats()
        return replace(stats, num_preemptions=stats.num_preemptions - self.num_others)


class PressedEngine:
    """Has more samples to decode than fit into the engine's KV cache."""

    def __init__(self, engine: VllmEngine, *, num_samples: int) -> None:
        self._engine = engine
        self._num_samples = num_samples
        self._num_asked = 0
        self._view = _OwnPreemptions(engine)
        profile = engine.profile()
        self._headroom = KvHeadroom(profile.kv_capacity_tokens, block_tokens=profile.kv_block_tokens)
        self._held: dict[asyncio.Task[None], list[int]] = {}
        """Samples under way, and each one's tokens."""

    async def measure(self, *, fixed: int | None, seed: int) -> PressureWindow:
        """Decode all samples of one repetition under one setting."""
        random = np.random.default_rng(seed)
        num_preempted_before = self._engine.stats().num_preemptions
        num_begun = num_ended = 0
        num_held: list[int] = []
        first: _Mark | None = None
        while num_begun < self._num_samples or first is None:
            for _ in range(min(self._num_more(fixed), self._num_samples - num_begun)):
                self._begin(random)
                num_begun += 1
            await asyncio.sleep(BEAT_S)
            num_ended += self._take_ended(is_rule=fixed is None)
            if num_ended >= WARM_UP_SHARE * self._num_samples:
                first = first or self._mark(num_begun)
                num_held.append(len(self._held))
        last = self._mark(num_begun)
        await asyncio.gather(*self._held)
        self._take_ended(is_rule=fixed is None)
        if fixed is not None:
            self._view.num_others += self._engine.stats().num_preemptions - num_preempted_before
        num_tokens = last.num_tokens - first.num_tokens
        return PressureWindow(
            fixed=fixed,
            tokens_per_second=num_tokens / (last.at_s - first.at_s),
            tokens_per_cpu_second=num_tokens / (last.cpu_s - first.cpu_s),
            preempted_share=(last.num_preemptions - first.num_preemptions) / (last.num_begun - first.num_begun),
            mean_samples=sum(num_held) / len(num_held),
        )

    def _num_more(self, fixed: int | None) -> int:
        if fixed is not None:
            return max(0, fixed - len(self._held))
        held = [_sample(position[0]) for position in self._held.values()]
        self._headroom.note_load(held, self._view.stats())
        return self._headroom.num_more(held, most=MAX_SAMPLES - len(held))

    def _begin(self, random: np.random.Generator) -> None:
        position = [0]
        self._held[asyncio.create_task(self._decode(random.integers(0, 2**31, 2).tolist(), position))] = position
        self._headroom.note_begun(_sample(0))

    def _take_ended(self, *, is_rule: bool) -> int:
        ended = [task for task in self._held if task.done()]
        for task in ended:
            task.result()
            num_tokens = self._held.pop(task)[0]
            if is_rule:
                self._headroom.note_finished(num_tokens)
        return len(ended)

    def _mark(self, num_begun: int) -> _Mark:
        stats = self._engine.stats()
        return _Mark(
            at_s=time.monotonic(),
            cpu_s=cpu_s(os.getpid()),
            num_tokens=stats.tokens_sampled,
            num_preemptions=stats.num_preemptions,
            num_begun=num_begun,
        )

    async def _decode(self, seed: list[int], position: list[int]) -> None:
        random = np.random.default_rng(seed)
        self._num_asked += 1
        location = np.log(MEAN_TOKENS) - LENGTH_SIGMA**2 / 2
        request = GenerateRequest(
            request_id=f"s{self._num_asked}",
            prompt_token_ids=tuple(random.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()),
            sampling=SamplingSettings(
                max_new_tokens=int(np.clip(random.lognormal(location, LENGTH_SIGMA), 1, MAX_TOKENS))
            ),
        )
        async with aclosing(self._engine.generate(request)) as spans:
            async for span in spans:
                position[0] += len(span.token_ids)


def _sample(num_new_tokens: int) -> RunningSample:
    # Sample lengths are unknown in advance: the limit is that of all.
    return RunningSample(num_prompt_tokens=PROMPT_TOKENS, num_new_tokens=num_new_tokens, max_new_tokens=MAX_TOKENS)


async def run(model_path: Path, plan: PressurePlan) -> dict[str, Any]:
    """Measure; returns the contents of the result file."""
    engine = VllmEngine(
        VllmEngineConfig(kv_cache_gib=plan.kv_cache_gib, max_concurrent_samples=MAX_SAMPLES),
        ServedModel(model_path=model_path, dtype="float32", seed=plan.seed),
    )
    await engine.start()
    windows: list[PressureWindow] = []
    try:
        pressed, profile = PressedEngine(engine, num_samples=plan.num_samples), engine.profile()
        for repetition in range(plan.num_repetitions):
            for fixed in (None, *plan.fixed_settings):
                async with asyncio.timeout(WINDOW_TIMEOUT_S):
                    windows.append(await pressed.measure(fixed=fixed, seed=plan.seed + repetition))
    finally:
        await engine.stop()
    return {
        "kv_capacity_tokens": profile.kv_capacity_tokens,
        "kv_block_tokens": profile.kv_block_tokens,
        "windows": [asdict(window) for window in windows],
    }


if __name__ == "__main__":
    end_group_with_parent(os.getppid(), grace_s=0)
    settings = json.loads(sys.argv[3])
    settings["fixed_settings"] = tuple(settings["fixed_settings"])
    document = asyncio.run(run(Path(sys.argv[1]), PressurePlan(**settings)))
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")
