"""Step times of emulated GPUs against published measurements, and against the arithmetic by hand."""

from __future__ import annotations

import pytest

from penstock.batching.step_times import STREAMRL_TABLE, LinearSteps, TableSteps, line_through
from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.emulation.roofline import Roofline

SEVEN = MODELS["qwen2.5-7b"]


def on(gpu: str, model: str = "qwen2.5-7b", **rest: float) -> Roofline:
    return Roofline(gpu=GPUS[gpu], model=MODELS[model], **rest)


@pytest.mark.parametrize("batch", STREAMRL_TABLE)
def test_the_roofline_of_an_h800_is_near_what_streamrl_measured(batch: int) -> None:
    assert on("H800").step_s(batch, batch * 2_500) == pytest.approx(STREAMRL_TABLE[batch], rel=0.07)


def test_one_sample_is_bound_by_reading_the_weights() -> None:
    by_hand = 2 * 7.616e9 / (3.35e12 * 0.75) + 0.002
    assert on("H800").step_s(1, 0) == pytest.approx(by_hand)


def test_a_large_batch_is_bound_by_flops_where_they_are_few() -> None:
    # An H20 has more bandwidth than an H800 and a seventh of its FLOPs.
    assert on("H20").step_s(1, 0) < on("H800").step_s(1, 0)
    assert on("H20").step_s(256, 0) > 2 * on("H800").step_s(256, 0)
    by_hand = 256 * 2 * (7.616e9 - 152_064 * 3584) / (148e12 * 0.6) + 0.002
    assert on("H20").step_s(256, 0) == pytest.approx(by_hand)


def test_kv_reads_make_steps_longer_and_bound_the_room() -> None:
    assert SEVEN.kv_token_bytes == 57_344
    extra_s = on("H800").step_s(8, 100_000) - on("H800").step_s(8, 0)
    assert extra_s == pytest.approx(100_000 * 57_344 / (3.35e12 * 0.75))
    assert on("H800").kv_capacity_tokens == pytest.approx((0.9 * 80e9 - 2e9 - 15.232e9) / 57_344, rel=1e-6)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="145 GB of weights leave no KV room in 70 GB"):
        on("H800", "qwen2.5-72b")
    assert on("H800", "qwen2.5-72b", num_gpus=4).kv_capacity_tokens > 300_000


def test_tensor_parallel_is_faster_but_not_by_the_number_of_gpus() -> None:
    one, four = on("A100-80").step_s(8, 0), on("A100-80", num_gpus=4).step_s(8, 0)
    assert one / 4 < four < one / 1.7
    # Cards on PCIe: two all-reduces a layer, each sends 2 (t - 1) / t of the batch's hidden states at 20 GB/s.
    more_s = on("L40S", num_gpus=4).step_s(64, 0) - on("L40S", num_gpus=4).step_s(1, 0)
    assert more_s == pytest.approx(2 * 28 * (2 * 0.75 * 63 * 3584 * 2) / 20e9)


def test_a_prefill_costs_more_than_its_share_when_it_is_long() -> None:
    times = on("H800")
    assert times.prefill_s(8_000) > 8 * times.prefill_s(1_000)
    assert times.prefill_s(1_000) == pytest.approx(1_000 * 14.14e9 / (989.5e12 * 0.65), rel=0.05)


def test_a_slowdown_is_one_of_everything() -> None:
    assert on("H800", slowdown=3).step_s(9, 5_000) == pytest.approx(3 * on("H800").step_s(9, 5_000))
    assert on("H800", slowdown=3).prefill_s(900) == pytest.approx(3 * on("H800").prefill_s(900))


def test_a_table_is_read_straight_between_its_entries_and_goes_on_behind_them() -> None:
    times = TableSteps(table=STREAMRL_TABLE)
    assert times.step_s(1, 0) == 0.0083
    assert times.step_s(128, 1e6) == 0.0152
    assert times.step_s(96, 0) == pytest.approx((0.0116 + 0.0152) / 2)
    assert times.step_s(768, 0) == pytest.approx(0.0369 + 0.0151)
    assert TableSteps(table=STREAMRL_TABLE, slowdown=2).step_s(3, 0) == pytest.approx(2 * 0.0088)


@pytest.mark.parametrize("table", [{}, {1: 0.1}, {0: 0.1, 2: 0.1}, {1: 0.0, 2: 0.1}])
def test_a_table_that_says_too_little_is_refused(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        TableSteps(table=table)


def test_a_line_is_its_own_profile() -> None:
    line = line_through(LinearSteps(base_s=0.01, per_sample_s=0.002), max_samples=64)
    assert (line.base_s, line.per_sample_s) == (pytest.approx(0.01), pytest.approx(0.002))
    assert (line.per_kv_token_s, line.prefill_tokens_per_second) == (0.0, None)


def test_the_profile_of_a_roofline_is_right_where_memory_bounds_it() -> None:
    times = on("H800")
    line = line_through(times, max_samples=128)
    told_s = line.base_s + 64 * line.per_sample_s + 200_000 * line.per_kv_token_s
    assert told_s == pytest.approx(times.step_s(64, 200_000), rel=0.01)
    assert line.prefill_tokens_per_second == pytest.approx(4096 / times.prefill_s(4096))
