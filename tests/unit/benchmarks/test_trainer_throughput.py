"""The trainer beside the bare loop: both train on the same samples, and what arrives in small groups fills packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trainer.throughput import compare
from tests.unit.trainer.builders import save_tiny_qwen2


@pytest.mark.slow
def test_both_are_measured_and_packs_are_nine_tenths_full(tmp_path: Path) -> None:
    model = save_tiny_qwen2(tmp_path, max_position_embeddings=256)
    result = compare(model, num_repetitions=1, progress=lambda text: None)
    assert result["pack_fill"] >= 0.9
    assert result["trainer_cpu_s_per_step"] > 0
    assert result["bare_cpu_s_per_step"] > 0
