"""The batch of an emulated GPU: slots, KV room, preemption, and not a second lost or found."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from penstock.batching.step_times import LinearSteps
from services.generator.emulation.continuous_batch import BatchSample, ContinuousBatch
from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.emulation.roofline import Roofline


class WatchedSteps(LinearSteps):
    """Notes every prefill."""

    prefilled: ClassVar[list[int]]

    def prefill_s(self, num_tokens: float) -> float:
        self.prefilled.append(int(num_tokens))
        return 0.001 * num_tokens


def sample(length: int, *, context: int = 0, position: int = 0) -> BatchSample:
    return BatchSample(context_tokens=context, length=length, position=position)


def batch_of(*samples: BatchSample, steps: object = None, slots: int = 64, room: int | None = None) -> ContinuousBatch:
    batch = ContinuousBatch(
        steps or LinearSteps(base_s=0.01, per_sample_s=0.001), max_samples=slots, kv_capacity_tokens=room
    )
    for item in samples:
        batch.add(item)
    return batch


def advance(batch: ContinuousBatch, elapsed_s: float) -> list[BatchSample]:
    batch.elapse(elapsed_s)
    return batch.pop_ended()


def run_to_the_end(batch: ContinuousBatch) -> float:
    began_s = batch.clock_s
    while batch.num_running:
        batch.advance(batch.next_end_s + 1e-9)
    return batch.clock_s - began_s


def test_more_samples_share_a_step_at_its_stated_cost() -> None:
    samples = [sample(100) for _ in range(10)]
    batch = batch_of(*samples)
    advance(batch, 0.02 * 30 + 0.019)
    assert {item.position for item in samples} == {30}
    # What was left of the time is not lost.
    advance(batch, 0.0011)
    assert {item.position for item in samples} == {31}


def test_a_finished_sample_makes_the_others_faster_at_once() -> None:
    short, long = sample(1), sample(100)
    batch = batch_of(short, long, steps=LinearSteps(per_sample_s=0.001))
    assert advance(batch, 0.002 + 0.0101) == [short]
    assert (short.position, long.position) == (1, 11)


def test_no_more_than_the_slots_are_decoded_and_the_rest_begins_in_turn() -> None:
    samples = [sample(2) for _ in range(5)]
    batch = batch_of(*samples, steps=LinearSteps(per_sample_s=0.001), slots=2)
    advance(batch, 0.0021)
    assert [item.position for item in samples] == [1, 1, 0, 0, 0]
    assert (batch.num_running, batch.num_waiting) == (2, 3)
    assert advance(batch, 0.0020) == samples[:2]
    assert (batch.num_running, batch.num_waiting) == (2, 1)


def test_time_in_pieces_is_worth_as_much_as_in_one() -> None:
    steps = Roofline(gpu=GPUS["H800"], model=MODELS["qwen2.5-7b"])
    whole, pieces = (batch_of(*(sample(500 + 90 * n, context=400) for n in range(20)), steps=steps) for _ in range(2))
    rng = random.Random(1)
    total_s = run_to_the_end(whole)
    spent_s = 0.0
    while pieces.num_running:
        piece_s = rng.uniform(0.0, 0.4)
        spent_s += piece_s
        advance(pieces, piece_s)
    assert spent_s == pytest.approx(total_s, abs=0.45)


def test_idle_time_is_not_saved_up() -> None:
    batch = batch_of()
    advance(batch, 1000.0)
    late = sample(10)
    batch.add(late)
    advance(batch, 0.011 * 3.5)
    assert late.position == 3


def test_a_prefill_stops_everybody_and_a_prefix_is_prefilled_too() -> None:
    steps = Roofline(gpu=GPUS["H800"], model=MODELS["qwen2.5-7b"])
    running = sample(10_000, context=100)
    batch = batch_of(running, steps=steps)
    advance(batch, 1.0)
    before = running.position
    batch.add(sample(9_000, context=1_000, position=7_000))
    advance(batch, steps.prefill_s(8_000) * 0.99)
    assert running.position == before
    advance(batch, steps.prefill_s(8_000) * 0.01 + steps.step_s(2, 10_000) * 5)
    assert running.position > before


def test_a_full_cache_sends_the_newest_back_and_nothing_is_decoded_twice() -> None:
    WatchedSteps.prefilled = []
    samples = [sample(400, context=10) for _ in range(4)]
    batch = batch_of(*samples, steps=WatchedSteps(base_s=0.005), room=1_000)
    ends: list[BatchSample] = []
    while batch.num_running:
        before = [item.position for item in samples]
        ends += advance(batch, 0.3)
        assert all(item.position >= old for item, old in zip(samples, before, strict=True))
        assert batch.kv_tokens <= 1_000 or batch.num_running == 1
    assert ends == samples
    assert batch.num_preemptions >= 2
    # The cache of what was sent back is computed again, with the tokens that it had.
    first, again = WatchedSteps.prefilled[:4], WatchedSteps.prefilled[4:]
    assert first == [10] * 4
    assert len(again) == batch.num_preemptions
    assert min(again) >= 11
    assert batch.kv_tokens == 0


def test_a_cache_with_room_for_all_preempts_no_sample() -> None:
    WatchedSteps.prefilled = []
    batch = batch_of(*(sample(400, context=10) for _ in range(4)), steps=WatchedSteps(base_s=0.005), room=4 * 410)
    run_to_the_end(batch)
    assert batch.num_preemptions == 0
    assert WatchedSteps.prefilled == [10] * 4


def test_a_sample_alone_may_be_larger_than_the_room() -> None:
    alone = sample(500)
    batch = batch_of(alone, room=100)
    run_to_the_end(batch)
    assert alone.position == 500


def test_recomputing_costs_the_prefill_of_all_that_is_held() -> None:
    steps = Roofline(gpu=GPUS["H800"], model=MODELS["qwen2.5-7b"])
    plain, again = (batch_of(sample(500, context=5_000), steps=steps) for _ in range(2))
    assert again.recompute() == (5_000, steps.prefill_s(5_000))
    assert run_to_the_end(again) - run_to_the_end(plain) == pytest.approx(steps.prefill_s(5_000), rel=1e-3)


def test_what_is_removed_makes_room() -> None:
    first, second = sample(10), sample(10)
    batch = batch_of(first, second, slots=1)
    batch.discard(first)
    assert (batch.num_running, batch.num_waiting, batch.kv_tokens) == (1, 0, 0)
    batch.discard(first)
    advance(batch, 1.0)
    assert (first.position, second.position) == (0, 10)


def test_who_was_sent_back_begins_again_before_those_that_never_began() -> None:
    first, second, third, fourth = (sample(400, context=10) for _ in range(4))
    batch = batch_of(first, second, third, fourth, slots=2, room=480)
    while first.position < first.length:
        advance(batch, 0.1)
    assert batch.num_preemptions == 1
    assert 200 < second.position < 260
    stood = second.position
    advance(batch, 0.1)
    assert second.position > stood
    assert third.position > fourth.position == 0
