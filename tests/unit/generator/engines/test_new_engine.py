"""An engine is added by a class and a line of the registry: nothing else asks which one it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from console.config.config import parse_run_config, resolve
from console.config.derive import generator_config
from console.config.run_folder import RunFolder
from console.inspect.doctor import examine
from console.launch.launcher import choose_addresses
from console.run.preflight import _package_problems
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import (
    Engine,
    EngineProfile,
    EngineStats,
    FinishReason,
    GenerateRequest,
    SamplingSettings,
    TokenSpan,
    UpdateReport,
    WeightUpdate,
)
from services.generator.engines.base_config import BaseEngineConfig, ServedModel
from services.generator.engines.registry import ENGINES


class ToyEngine:
    """Says one token, as often as it may."""

    policy_version = 0

    def __init__(self, token_id: int, max_model_len: int) -> None:
        self.token_id = token_id
        self.max_model_len = max_model_len

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        num_tokens = request.sampling.max_new_tokens
        yield TokenSpan(
            token_ids=np.full(num_tokens, self.token_id, np.int32),
            logprobs=np.zeros(num_tokens, np.float32),
            policy_version=self.policy_version,
            finish_reason=FinishReason.LENGTH,
        )

    async def abort(self, request_id: str) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        raise NotImplementedError

    def profile(self) -> EngineProfile:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    async def stop(self) -> None: ...


class ToyEngineConfig(BaseEngineConfig):
    """The toy's keys."""

    packages = ("no-such-toys",)

    engine: Literal["toy"] = "toy"
    """The engine."""
    toy_token: int = 1
    """What it says."""

    def build(self, model: ServedModel) -> Engine:
        return ToyEngine(self.toy_token, self.max_context_tokens or 64)


async def test_a_toy_engine_is_configured_built_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENGINES, "toy", ToyEngineConfig)
    document = {
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "generator": {"engine": "toy", "toy_token": 7, "kv_cache_gib": 2, "count": 1},
    }
    run = resolve(parse_run_config(document, source="toy.yaml"), now_s=0.0)
    assert "generator.engine: toy needs the package no-such-toys" in _package_problems(run)[0]
    assert "no-such-toys (engine toy): not installed" in [finding.text for finding in examine()]
    config = generator_config(run, choose_addresses(run), RunFolder(tmp_path), 0)
    config = GeneratorConfig.model_validate_json(config.model_dump_json())
    assert (config.engine.engine, config.engine.version()) == ("toy", ENGINES["emulated"].version())
    engine = config.engine.build(config)
    await engine.start()
    sampling = SamplingSettings(temperature=1.0, max_new_tokens=3)
    request = GenerateRequest(request_id="a", prompt_token_ids=(5,), sampling=sampling)
    assert [span.token_ids.tolist() async for span in engine.generate(request)] == [[7, 7, 7]]
    await engine.stop()
