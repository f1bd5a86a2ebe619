"""What a trainer publishes reaches every worker of an engine that is spread over several."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.collective.broadcast_backend import Transport
from services.generator.engines.vllm.config import VllmEngineConfig
from tests.helpers.generators.trained_generator import install_every_step, ways_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


async def test_deltas_reach_every_pipeline_stage(tmp_path: Path) -> None:
    engine = VllmEngineConfig(max_concurrent_samples=2, kv_cache_gib=0.0625, pipeline_parallel=2)
    metrics = await install_every_step(tmp_path, engine)
    assert ways_of(metrics)["delta"] >= 1


async def test_broadcasts_reach_every_tensor_parallel_worker(tmp_path: Path) -> None:
    engine = VllmEngineConfig(max_concurrent_samples=2, kv_cache_gib=0.0625, tensor_parallel=2)
    metrics = await install_every_step(tmp_path, engine, transport=Transport.GLOO)
    assert metrics.broadcasts.labels("ok")._value.get() >= 1
