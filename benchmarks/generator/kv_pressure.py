"""Concurrency by measured KV pressure against fixed settings, on a real vLLM engine with a small KV cache.

A process of its own: `python -m benchmarks.generator.kv_pressure MODEL_DIR RESULT.json PLAN_JSON`.

One engine decodes the same samples under each setting, one setting after the other, as often as the plan says: other
work on the machine meets all of them. Each begins with an empty engine and a rule that has seen nothing, and is counted
from when a quarter of its samples has ended until the last has begun.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generator.concurrency import BEAT_S, MAX_SAMPLES, WARM_UP_SHARE
from benchmarks.generator.cpu_time import cpu_s
from benchmarks.generator.model import VOCAB_SIZE
from benchmarks.group_end import end_group_with_parent
from services.generator.credit import Credit
from services.generator.engine import EngineProfile, EngineStats, GenerateRequest, SamplingSettings
from services.generator.kv_room import HeldSample
from services.generator.vllm_engine import VllmEngine
from services.generator.vllm_setup import VllmSettings

PROMPT_TOKENS = 100
MEAN_TOKENS, LENGTH_SIGMA, MAX_TOKENS = 200.0, 0.6, 900
MAX_CONTEXT = PROMPT_TOKENS + MAX_TOKENS
WINDOW_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePlan:
    """How much is measured."""

    fixed_settings: tuple[int, ...]
    """Samples at once."""
    num_repetitions: int
    num_samples: int
    """Of each setting in each repetition."""
    kv_cache_gib: float
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureWindow:
    """One setting, once."""

    fixed: int | None
    """None: as many as the rule asks for."""
    tokens_per_second: float
    tokens_per_cpu_second: float
    """Of this process and the engine's together: what other work on the machine changes least."""
    preempted_share: float
    """Preemptions over samples."""
    mean_samples: float
    """Samples at once, over the beats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    cpu_s: float
    num_tokens: int
    num_preemptions: int
    num_begun: int


class _EngineSince:
    """The engine as the rule sees it: preemptions count from now on."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._num_before = engine.stats().num_preemptions

    def profile(self) -> EngineProfile:
        """Its room."""
        return self._engine.profile()

    def stats(self) -> EngineStats:
        """Its load."""
        stats = self._engine.stats()
        return replace(stats, num_preemptions=stats.num_preemptions - self._num_before)


class PressedEngine:
    """Has more samples to decode than the engine's KV cache bears."""

    def __init__(self, engine: VllmEngine, plan: PressurePlan) -> None:
        self._engine = engine
        self._plan = plan
        self._num_asked = 0

    async def measure(self, *, fixed: int | None, seed: int) -> PressureWindow:
        """Decode all samples of one repetition under one setting."""
        random = np.random.default_rng(seed)
        credit = Credit(_EngineSince(self._engine))
        positions: dict[asyncio.Task[None], list[int]] = {}
        marks: list[_Mark] = []
        num_held: list[int] = []
        num_begun = num_ended = 0
        while num_begun < self._plan.num_samples:
            held = [_held(position[0]) for position in positions.values()]
            room = MAX_SAMPLES - len(held)
            more = credit.num_more(held, most=room) if fixed is None else max(0, fixed - len(held))
            for _ in range(min(more, self._plan.num_samples - num_begun)):
                position = [0]
                task = asyncio.create_task(self._decode(random.integers(0, 2**31, 2).tolist(), position))
                positions[task] = position
                credit.note_begun(_held(0))
                num_begun += 1
            await asyncio.sleep(BEAT_S)
            for task in [task for task in positions if task.done()]:
                task.result()
                credit.note_finished(positions.pop(task)[0])
                num_ended += 1
            if num_ended >= WARM_UP_SHARE * self._plan.num_samples:
                marks.append(self._mark(num_begun))
                num_held.append(len(positions))
        await asyncio.gather(*positions)
        first, last = marks[0], marks[-1]
        num_tokens = last.num_tokens - first.num_tokens
        return PressureWindow(
            fixed=fixed,
            tokens_per_second=num_tokens / (last.at_s - first.at_s),
            tokens_per_cpu_second=num_tokens / (last.cpu_s - first.cpu_s),
            preempted_share=(last.num_preemptions - first.num_preemptions) / (last.num_begun - first.num_begun),
            mean_samples=sum(num_held) / len(num_held),
        )

    def _mark(self, num_begun: int) -> _Mark:
        stats = self._engine.stats()
        return _Mark(
            at_s=time.monotonic(),
            cpu_s=cpu_s(),
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


def _held(num_new_tokens: int) -> HeldSample:
    # Nobody knows how long a sample gets: the limit is that of all.
    return HeldSample(num_prompt_tokens=PROMPT_TOKENS, num_new_tokens=num_new_tokens, max_new_tokens=MAX_TOKENS)


async def run(model_path: Path, plan: PressurePlan) -> dict[str, Any]:
    """Measure; returns what the result file holds."""
    engine = VllmEngine(
        VllmSettings(
            model_path=model_path,
            dtype="float32",
            kv_cache_gib=plan.kv_cache_gib,
            max_num_seqs=MAX_SAMPLES,
            seed=plan.seed,
        )
    )
    await engine.start()
    windows: list[PressureWindow] = []
    try:
        pressed, profile = PressedEngine(engine, plan), engine.profile()
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
    end_group_with_parent()
    settings = json.loads(sys.argv[3])
    settings["fixed_settings"] = tuple(settings["fixed_settings"])
    document = asyncio.run(run(Path(sys.argv[1]), PressurePlan(**settings)))
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")
