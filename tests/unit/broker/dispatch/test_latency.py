from __future__ import annotations

import pytest

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel, Load, level_s
from services.broker.dispatch.length_histogram import LengthCounts, remaining_tokens
from services.broker.dispatch.streamrl import long_tail_instances, part_s
from services.broker.fleet.throughput import measured


def make_load(*remaining: float, context: float = 0.0, max_samples: int = 4, **model: float) -> Load:
    """A generator of 1 s a step and 0.5 s a sample, unless said otherwise."""
    values = {"base_s": 1.0, "per_sample_s": 0.5} | model
    load = Load(model=LatencyModel(**values), max_samples=max_samples, max_leases=max_samples)
    for tokens in remaining:
        load.add(tokens, context)
    return load


def test_a_batch_ends_when_its_steps_summed_by_hand_end() -> None:
    # 2 steps of 3 samples, 4 of 2 and 4 of 1: 2 * 2.5 + 4 * 2 + 4 * 1.5.
    assert make_load(2, 6, 10).finish_s() == pytest.approx(19.0)


def test_samples_beyond_the_slots_take_turns() -> None:
    # 8 samples of 3 tokens in 4 slots: 6 steps of 4.
    assert make_load(*[3] * 8).finish_s() == pytest.approx(6 * 3.0)


def test_kv_reads_are_counted_token_by_token() -> None:
    load = make_load(3, context=10, base_s=0.0, per_sample_s=0.0, per_kv_token_s=1.0)
    # 3 steps that read 10 to 13 tokens: 3 * 10 + 3^2 / 2.
    assert load.finish_s() == pytest.approx(34.5)


def test_the_kv_room_bounds_the_batch() -> None:
    model = LatencyModel(max_samples=100, kv_capacity_tokens=1000)
    assert (model.max_batch(50), model.max_batch(5), model.max_batch(5000)) == (20, 100, 1)


def test_poured_work_ends_everywhere_at_once() -> None:
    idle, busy = make_load(), make_load(*[3] * 8)
    # Each does 4 tokens in 3 s. The busy one ends at 18 s, by when the idle one has done 24 tokens; then both go on.
    assert level_s([idle, busy], 12) == pytest.approx(9.0)
    assert level_s([idle, busy], 24 + 8) == pytest.approx(21.0)
    assert level_s([], 1) == float("inf")


def test_a_part_is_done_when_its_longest_sample_and_its_work_are() -> None:
    lengths = LengthCounts()
    lengths.add(8, 1)
    lengths.add(1, 4)
    # Two generators: 8 steps of 1 s base, and 12 tokens shared as 0.5 s each: 8 + 12 / 2 * 0.5.
    assert part_s([make_load(), make_load()], lengths, 1.0) == pytest.approx(11.0, rel=1e-6)


def test_the_split_minimises_the_later_part_not_the_sum() -> None:
    long, regular = LengthCounts(), LengthCounts()
    long.add(64, 2)
    regular.add(8, 64)
    loads = {f"g{index}": make_load() for index in range(4)}
    found = long_tail_instances(loads, long, regular, 1.0)
    times = {
        count: (
            part_s([make_load()] * count, long, 1.0),
            part_s([make_load()] * (4 - count), regular, 1.0),
        )
        for count in (1, 2, 3)
    }
    assert len(found) == min(times, key=lambda count: max(times[count])) == 1
    assert found == {"g0"}


def test_the_generators_fastest_alone_take_the_long_tail() -> None:
    long, regular = LengthCounts(), LengthCounts()
    long.add(64, 2)
    regular.add(8, 8)
    loads = {"a": make_load(base_s=3.0), "b": make_load(base_s=1.0), "c": make_load(base_s=2.0)}
    assert "b" in long_tail_instances(loads, long, regular, 1.0)
    assert long_tail_instances({"a": make_load()}, long, regular, 1.0) == frozenset()


def test_the_threshold_leaves_at_most_the_share_above() -> None:
    lengths = LengthCounts()
    for tokens in (100, 200, 400, 800, 1600):
        lengths.add(tokens, 2)
    long, rest = lengths.parted(lengths.threshold(0.2))
    assert (long.num_samples, rest.num_samples) == (2, 8)
    alike = LengthCounts()
    alike.add(100, 10)
    assert alike.parted(alike.threshold(0.2))[0].num_samples == 0


def test_counts_go_back_to_nothing() -> None:
    lengths = LengthCounts()
    lengths.add(100, 3)
    lengths.add(0, 2)
    assert (lengths.num_samples, lengths.sum_tokens(50)) == (5, pytest.approx(3 * 100 + 2 * 50, rel=0.05))
    lengths.add(101, -3)
    lengths.add(0, -2)
    assert (lengths.num_samples, list(lengths.items())) == (0, [])


def test_a_sample_that_outlived_its_forecast_has_more_to_come() -> None:
    assert remaining_tokens(100, 40) == 60
    assert remaining_tokens(100, 400) == 100
    assert remaining_tokens(0, 0) == 1


def test_a_measured_rate_corrects_the_profile() -> None:
    profile = broker_pb2.GeneratorProfile(step_base_s=0.01, step_per_sample_s=0.001)
    hello = broker_pb2.GeneratorHello(generator_id="g", profile=profile)
    speed = measured(None, hello, broker_pb2.GeneratorBeat())
    assert speed is None
    # 10 samples at 250 tokens/s are 0.04 s a step, twice what the profile says.
    for _ in range(3):
        speed = measured(speed, hello, broker_pb2.GeneratorBeat(num_running=10, tokens_per_second=250))
    assert speed is not None
    assert speed.step_factor == pytest.approx(2.0)
    # One odd beat moves it by a fifth of the way.
    speed = measured(speed, hello, broker_pb2.GeneratorBeat(num_running=10, tokens_per_second=500))
    assert speed is not None
    assert speed.step_factor == pytest.approx(2.0**0.8)
