"""From a generator's configuration to what its emulated engine emulates."""

from __future__ import annotations

import pytest

from services.generator.emulation.config import EmulatedConfig
from services.generator.emulation.length_law import HistogramLengths, ReplayedLengths
from services.generator.engines.base_config import ServedModel
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import EmulatedSpec
from services.generator.engines.emulated.from_config import build_spec


def spec_of(*, tensor_parallel: int = 1, **emulated: object) -> EmulatedSpec:
    engine = EmulatedEngineConfig(tensor_parallel=tensor_parallel, max_context_tokens=20_000)
    return build_spec(engine, ServedModel(model_path="none", emulated=EmulatedConfig(**emulated)))


def test_a_gpu_by_name_brings_its_speed_and_its_room() -> None:
    spec = spec_of(gpu="H800")
    assert spec.kv_capacity_tokens == 955_078
    assert spec.steps.step_s(1, 0) == pytest.approx(0.0081, rel=0.01)
    assert spec_of(gpu="H800", slowdown=2).steps.step_s(1, 0) == pytest.approx(0.0162, rel=0.01)
    big = spec_of(gpu="H800", model="qwen2.5-72b", tensor_parallel=4)
    assert big.kv_capacity_tokens == pytest.approx((4 * 70e9 - 145.4e9) / 327_680, rel=1e-3)


def test_without_a_gpu_the_stated_rate_is_kept_whatever_the_batch() -> None:
    spec = spec_of()
    assert spec.kv_capacity_tokens is None
    assert 64 / spec.steps.step_s(64, 1e6) == pytest.approx(2000)


def test_streamrls_steps_take_room_and_prefill_from_the_gpu() -> None:
    spec = spec_of(gpu="H800", steps="streamrl", slowdown=2)
    assert spec.steps.step_s(128, 1e6) == pytest.approx(2 * 0.0152)
    assert spec.kv_capacity_tokens == 955_078
    assert spec.steps.prefill_s(1000) > 0
    assert spec_of(steps="streamrl").steps.prefill_s(1000) == 0


def test_lengths_come_from_where_the_configuration_says(tmp_path) -> None:
    (tmp_path / "lengths.txt").write_text("3\n4\n", encoding="utf-8")
    assert spec_of(lengths="streamrl", length_scale=0.5).lengths == HistogramLengths(scale=0.5)
    assert spec_of(lengths=str(tmp_path / "lengths.txt")).lengths == ReplayedLengths(lengths=[3, 4])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"gpu": "H8000"}, "did you mean 'H800'"),
        ({"gpu": "H800", "model": "gpt-5"}, "emulated.model: 'gpt-5' is not known; there are qwen2.5-1.5b"),
        ({"gpu": "L4", "model": "qwen2.5-32b"}, "qwen2.5-32b on 1 x L4: .* add GPUs"),
        ({"kv_capacity_tokens": 10_000}, "lower max_context_tokens"),
    ],
)
def test_what_cannot_be_emulated_is_refused_in_a_line(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        spec_of(**settings)
