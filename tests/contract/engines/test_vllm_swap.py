"""What `penstock bench weights --engine vllm` measures, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.weights import swap


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_the_pause_of_a_swap_is_measured_in_a_real_vllm_engine(tmp_path: Path) -> None:
    result = await swap.measure(tmp_path, engine="vllm", hidden_size=64, num_layers=2, num_updates=2)
    assert (result["engine"], result["num_repetitions"]) == ("vllm", 2)
    least_ms, most_ms = result["spread"]["pause_ms"]
    assert 0 < least_ms <= most_ms
