"""The batch that emulated engines, the look-ahead and the simulators share: by hand, and however it is asked."""

from __future__ import annotations

import math
import random

import pytest

from penstock.batching.batched_engine import BatchedEngine
from penstock.batching.step_times import LinearSteps
from services.generator.emulation.continuous_batch import BatchSample, ContinuousBatch

STEPS = LinearSteps(base_s=1.0, per_sample_s=0.5)


def engine_of(**lengths: float) -> BatchedEngine[str]:
    engine: BatchedEngine[str] = BatchedEngine(STEPS.step_s)
    for name, length in lengths.items():
        engine.begin(name, length=length)
    return engine


def ends_of(engine: BatchedEngine[str]) -> list[tuple[str, float]]:
    """To the last sample: which ended when."""
    found: list[tuple[str, float]] = []
    while engine.num_running:
        engine.advance(engine.next_end_s)
        found += [(name, engine.clock_s) for name in engine.pop_ended()]
    return found


def test_samples_end_when_their_steps_summed_by_hand_end() -> None:
    # 2 steps of 3 samples, 4 of 2 and 4 of 1.
    ends = ends_of(engine_of(a=2, b=6, c=10))
    assert ends == [("a", pytest.approx(5.0)), ("b", pytest.approx(13.0)), ("c", pytest.approx(19.0))]


def test_samples_that_end_together_end_in_the_order_in_which_they_began() -> None:
    engine = engine_of(b=3, a=3, c=4)
    engine.advance(engine.next_end_s)
    assert engine.pop_ended() == ["b", "a"]
    assert engine.pop_ended() == []


def test_an_empty_batch_ends_never_and_idle_time_decodes_nothing() -> None:
    engine = engine_of()
    assert engine.next_end_s == math.inf
    engine.advance(100.0)
    engine.begin("late", length=2)
    assert engine.next_end_s == pytest.approx(100.0 + 2 * 1.5)
    assert (engine.num_steps, engine.busy_s) == (0, 0.0)


def test_a_stall_holds_up_everybody_and_a_delay_only_its_own_sample() -> None:
    stalled, delayed = engine_of(a=4), engine_of(a=4)
    stalled.stall(10.0)
    delayed.begin("b", length=4, delay_s=10.0)
    assert stalled.next_end_s == pytest.approx(10.0 + 4 * 1.5)
    stalled.advance(10.0)
    assert stalled.num_steps == 0
    # 4 steps of 2 samples; the other one waits for 10 s of such steps, of which 4 passed, and then has 4 to go.
    ends = ends_of(delayed)
    assert ends == [("a", pytest.approx(8.0)), ("b", pytest.approx(8.0 + (5 - 4 + 4) * 1.5))]


def test_a_removed_sample_leaves_the_others_faster_and_keeps_its_position() -> None:
    engine = engine_of(a=10)
    other = engine.begin("b", length=12, position=2)
    engine.advance(4.0)
    assert engine.position(other) == pytest.approx(4.0)
    assert engine.remove(other) == "b"
    assert engine.next_end_s == pytest.approx(4.0 + 8 * 1.5)
    engine.clear()
    assert (engine.num_running, engine.next_end_s) == (0, math.inf)


def test_kv_tokens_grow_with_the_steps_and_go_with_their_sample() -> None:
    engine: BatchedEngine[str] = BatchedEngine(LinearSteps(per_kv_token_s=1.0).step_s, kv_growth=1)
    engine.begin("a", length=30, position=10, kv_tokens=100)
    begun = engine.begin("b", length=50, kv_tokens=40)
    assert (engine.kv_tokens, engine.step_s) == (150, 150.0)
    engine.advance(300.0)
    assert engine.kv_tokens == pytest.approx(150 + 2 * 2)
    assert engine.step_s == pytest.approx(154.0)
    engine.remove(begun)
    assert engine.kv_tokens == pytest.approx(112.0)


@pytest.mark.parametrize("seed", range(10))
def test_however_often_it_is_advanced_between_samples_end_at_the_same_time(seed: int) -> None:
    rng = random.Random(seed)
    lengths = {f"s{index}": rng.uniform(1, 500) for index in range(40)}
    at_once, in_pieces = engine_of(**lengths), engine_of(**lengths)
    expected = ends_of(at_once)
    found: list[tuple[str, float]] = []
    while in_pieces.num_running:
        in_pieces.advance(min(in_pieces.next_end_s, in_pieces.clock_s + rng.expovariate(0.1)))
        found += [(name, in_pieces.clock_s) for name in in_pieces.pop_ended()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [end_s for _, end_s in found] == pytest.approx([end_s for _, end_s in expected], rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_whole_steps_end_samples_when_fractions_of_steps_do(seed: int) -> None:
    """Where nothing waits, is preempted or reads the KV cache, the emulated engine is the same batch."""
    rng = random.Random(seed)
    lengths = {f"s{index}": rng.randint(1, 500) for index in range(40)}
    whole = ContinuousBatch(STEPS, max_samples=64)
    names: dict[int, str] = {}
    for name, length in lengths.items():
        sample = BatchSample(context_tokens=7, length=length, position=0)
        names[id(sample)] = name
        whole.add(sample)
    found: dict[str, float] = {}
    while whole.num_running:
        whole.advance(whole.next_end_s + 1e-9)
        found |= {names[id(sample)]: whole.clock_s for sample in whole.pop_ended()}
    assert found == pytest.approx(dict(ends_of(engine_of(**lengths))), abs=1e-6)
