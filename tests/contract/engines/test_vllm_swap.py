"""Pauses of swaps in a real vLLM engine: of tiny models wherever vLLM runs, of real sizes on GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.weights import swap
from benchmarks.weights.swap_models import QWEN3, qwen3_model, small_model

QWEN3_TINY = qwen3_model(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    head_dim=32,
    vocab_size=256,
    max_position_embeddings=4096,
)


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(small_model(hidden_size=64, num_layers=2), id="float32"),
        pytest.param(QWEN3_TINY, id="the kind that is measured on GPUs", marks=pytest.mark.grid),
    ],
)
async def test_the_pause_of_a_swap_is_measured_in_a_real_vllm_engine(tmp_path: Path, model: swap.SwapModel) -> None:
    result = await swap.measure(tmp_path, engine="vllm", model=model, num_updates=2)
    assert (result["engine"], result["num_repetitions"]) == ("vllm", 2)
    least_ms, most_ms = result["spread"]["pause_ms"]
    assert 0 < least_ms <= most_ms
    assert result["load_s"] > 0
    assert result["update_s"] * 1000 >= result["pause_ms"]


NEEDED_GB = {"qwen3-0.6b": 8, "qwen3-4b": 24}
"""Memory of the GPU: weights, the engine's own and a KV cache. On the disk twice the weights."""


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and vllm built for it")
@pytest.mark.parametrize("name", QWEN3)
async def test_swaps_of_real_sizes_are_measured(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needed_gb = NEEDED_GB[name]
    has_gb, free_gb = torch.cuda.mem_get_info()[1] / 1e9, shutil.disk_usage(tmp_path).free / 1e9
    if min(has_gb, free_gb) < needed_gb:
        pytest.skip(f"needs {needed_gb} GB of GPU memory and of disk; there are {has_gb:.0f} and {free_gb:.0f}")
    result = await swap.measure(tmp_path, engine="vllm", model=QWEN3[name], num_updates=5, timeout_s=1800)
    (least_ms, most_ms), size_gb = result["spread"]["pause_ms"], result["size_bytes"] / 1e9
    record_property("weights, GB", f"{size_gb:.2f}")
    record_property("engine up, s", f"{result['load_s']:.1f}")
    record_property(
        "pause, ms, median of 5 (least to most)", f"{result['pause_ms']:.0f} ({least_ms:.0f} to {most_ms:.0f})"
    )
    record_property("whole update, s", f"{result['update_s']:.2f}")
    assert size_gb == pytest.approx({"qwen3-0.6b": 1.19, "qwen3-4b": 8.04}[name], rel=0.02)
    assert 0 < least_ms <= most_ms
