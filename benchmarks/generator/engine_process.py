"""Runs one busy vLLM engine, alternately with and without updates.

A separate process: `python -m benchmarks.generator.engine_process MODEL_DIR RESULT.json PLAN_JSON`.

Windows without updates alternate with windows with an update every few seconds in the same engine, so that other work
on the machine affects both. The result file has one row per window and the finished samples, for replaying.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.broker.processes import cpu_s
from benchmarks.generator.model import VOCAB_SIZE
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.process.bound_child import end_group_with_parent
from services.generator.engine.engine import GenerateRequest, SamplingSettings, UpdateMode, WeightUpdate
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine

PROMPT_TOKENS = 24
MEAN_TOKENS, LENGTH_SIGMA, MAX_TOKENS = 150.0, 0.6, 450
WINDOWS = (None, UpdateMode.KEEP, UpdateMode.RECOMPUTE)
"""Without updates, and with updates in either mode."""
FINISH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """How much to do."""

    num_cycles: int
    """Rounds of all WINDOWS."""
    window_s: float
    update_interval_s: float
    num_concurrent: int = 64
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class FinishedSample:
    """A sample as yielded by the engine."""

    prompt: list[int]
    num_asked: int
    """Intended tokens."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of each token."""
    finish_reason: str = ""


@dataclass(slots=True, kw_only=True)
class Window:
    """Result of one window."""

    mode: str | None
    """Mode of updates; None without updates."""
    tokens_per_second: float = 0.0
    tokens_per_cpu_second: float = 0.0
    """Rate over the CPU time of this process and the engine: the number least affected by other work on the machine."""
    pauses_s: list[float] = field(default_factory=list)
    num_recomputed_tokens: int = 0


class BusyEngine:
    """Keeps `num_concurrent` samples running and records all of them."""

    def __init__(self, engine: VllmEngine, plan: EnginePlan, files: Sequence[Path]) -> None:
        self._engine = engine
        self._plan = plan
        self._files = files
        self._random = np.random.default_rng(plan.seed)
        self._numbers = itertools.count()
        self._is_ending = False
        self.samples: list[FinishedSample] = []
        self.version_files: dict[int, str] = {0: str(files[0])}
        self.modes: dict[int, str] = {}
        """Mode in which each version was loaded."""

    async def measure(self) -> list[Window]:
        """Runs the plan."""
        tasks = [asyncio.create_task(self._keep_busy()) for _ in range(self._plan.num_concurrent)]
        windows: list[Window] = []
        try:
            await self._window(None)
            for _ in range(self._plan.num_cycles):
                windows += [await self._window(mode) for mode in WINDOWS]
        finally:
            self._is_ending = True
        async with asyncio.timeout(FINISH_TIMEOUT_S):
            await asyncio.gather(*tasks)
        return windows

    async def _window(self, mode: UpdateMode | None) -> Window:
        window = Window(mode=mode)
        begin_s, begin_cpu_s, begin_tokens = time.monotonic(), cpu_s(os.getpid()), self._engine.stats().tokens_sampled
        end_s = begin_s + self._plan.window_s
        while (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._plan.update_interval_s))
            if mode is not None and time.monotonic() < end_s:
                await self._update(window, mode)
        num_tokens = self._engine.stats().tokens_sampled - begin_tokens
        window.tokens_per_second = num_tokens / (time.monotonic() - begin_s)
        window.tokens_per_cpu_second = num_tokens / (cpu_s(os.getpid()) - begin_cpu_s)
        return window

    async def _update(self, window: Window, mode: UpdateMode) -> None:
        version = self._engine.policy_version + 1
        path = self._files[version % len(self._files)]
        tensors = await asyncio.to_thread(safetensors_digests, path)
        update = WeightUpdate(
            policy_version=version,
            path=path,
            tensors=tensors,
            digest=manifest_digest(tensors),
            is_recomputing=mode is UpdateMode.RECOMPUTE,
        )
        self.version_files[version], self.modes[version] = str(path), mode
        report = await self._engine.update_weights(update)
        window.pauses_s.append(report.pause_s)
        window.num_recomputed_tokens += report.num_recomputed_tokens

    async def _keep_busy(self) -> None:
        while not self._is_ending:
            prompt = self._random.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
            location = np.log(MEAN_TOKENS) - LENGTH_SIGMA**2 / 2
            num_asked = int(np.clip(self._random.lognormal(location, LENGTH_SIGMA), 1, MAX_TOKENS))
            sample = FinishedSample(prompt=prompt, num_asked=num_asked)
            self.samples.append(sample)
            request = GenerateRequest(
                request_id=f"s{next(self._numbers)}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingSettings(max_new_tokens=num_asked),
            )
            async with aclosing(self._engine.generate(request)) as spans:
                async for span in spans:
                    sample.token_ids += span.token_ids.tolist()
                    sample.logprobs += span.logprobs.tolist()
                    sample.versions += [span.policy_version] * len(span.token_ids)
                    sample.finish_reason = span.finish_reason or ""


async def run(model_path: Path, plan: EnginePlan) -> dict[str, Any]:
    """Measure; returns the contents of the result file."""
    files = [model_path / "model.safetensors", *sorted((model_path / "versions").iterdir())]
    engine = VllmEngine(
        VllmEngineConfig(kv_cache_gib=0.25), ServedModel(model_path=model_path, dtype="float32", seed=plan.seed)
    )
    await engine.start()
    try:
        busy = BusyEngine(engine, plan, files)
        windows = await busy.measure()
        num_preemptions = engine.stats().num_preemptions
    finally:
        await engine.stop()
    return {
        "windows": [asdict(window) for window in windows],
        "samples": [asdict(sample) for sample in busy.samples],
        "version_files": busy.version_files,
        "modes": busy.modes,
        "num_preemptions": num_preemptions,
    }


if __name__ == "__main__":
    end_group_with_parent(os.getppid(), grace_s=0)
    document = asyncio.run(run(Path(sys.argv[1]), EnginePlan(**json.loads(sys.argv[3]))))
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")
