"""A real trainer's steps reach a real engine: published, fetched as deltas, attested, reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.generator.engines.transformers.config import TransformersEngineConfig
from tests.helpers.generators.trained_generator import NUM_STEPS, install_every_step, ways_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.timeout(180)
async def test_the_steps_of_a_trainer_reach_the_engine_as_deltas(tmp_path: Path) -> None:
    metrics = await install_every_step(tmp_path, TransformersEngineConfig(max_concurrent_samples=2))
    ways = ways_of(metrics)
    # The run does not wait for the delta to its last version.
    assert ways["delta"] >= NUM_STEPS - 1, ways
    assert 1 <= ways["full"] <= 2, ways
    assert metrics.delta_fallbacks._value.get() == 0
