from __future__ import annotations

import pytest

from benchmarks.generator.concurrency import SMALL_WORKLOAD, simulate
from services.generator.decoding.kv_headroom import MAX_MARGIN, KvHeadroom, RunningSample


def held(num_new=0, *, prompt=100, limit=1000):
    return RunningSample(num_prompt_tokens=prompt, num_new_tokens=num_new, max_new_tokens=limit)


def knowing(capacity, *, length=200, **settings):
    """A room that has seen many samples of one length."""
    room = KvHeadroom(capacity, **settings)
    for _ in range(1000):
        room.note_finished(length)
    return room


def test_one_is_begun_to_see_how_large_samples_are():
    assert KvHeadroom(10).num_more([], most=64) == 1


def test_samples_that_are_over_before_anybody_asks_are_learned_from():
    room = KvHeadroom(11_000)
    room.note_begun(held())
    room.note_finished(200)
    assert room.num_more([], most=64) > 8


def test_before_any_has_finished_every_sample_is_taken_to_reach_its_limit():
    room = KvHeadroom(11_000)
    assert room.num_more([held()], most=64) == pytest.approx(9, abs=1)


def test_known_lengths_bring_more():
    assert knowing(11_000).num_more([held()], most=64) == pytest.approx(11_000 / 300 - 1, rel=0.05)


def test_samples_that_will_have_ended_by_then_leave_their_room():
    young, old = ([held(number)] * 30 for number in (0, 190))
    room = knowing(11_000)
    assert room.num_more(old, most=64) > room.num_more(young, most=64) + 5


def test_no_more_than_asked_for_and_none_where_all_is_taken():
    room = knowing(11_000)
    assert room.num_more([held()], most=5) == 5
    assert room.num_more([held()], most=0) == 0
    assert room.num_more([held(150)] * 60, most=64) == 0


def test_a_sample_larger_than_the_room_is_begun_alone():
    room = KvHeadroom(10)
    assert room.num_more([held()], most=64) == 0
    assert room.num_more([], most=64) == 1


def test_a_prompt_counts_by_the_share_of_it_that_the_cache_holds():
    room = knowing(100_000, length=50)
    samples = [held(25, prompt=2000)] * 16
    alone = room.num_more(samples, most=512)
    for _ in range(100):
        # Groups of eight: two prompts and sixteen completions.
        room.note_usage(samples, (2 * 2000 + 16 * 25) / 100_000)
    assert room.num_more(samples, most=512) > 6 * alone


def test_blocks_count_whole():
    small = held(prompt=10)
    assert knowing(12_800, length=20).num_more([small], most=512) > 300
    assert knowing(12_800, length=20, block_tokens=128).num_more([small], most=512) == 99


def test_the_margin_grows_with_preemptions_and_shrinks_without():
    room = KvHeadroom(1000)
    first = room.margin
    room.note_preemptions(3)
    assert room.margin > first
    room.note_preemptions(3)
    grown = room.margin
    for _ in range(100):
        room.note_finished(10)
    assert room.margin < grown
    room.note_preemptions(10_000)
    assert room.margin == MAX_MARGIN


def test_it_decodes_faster_than_any_fixed_setting_that_preempts_as_little():
    adaptive = simulate(SMALL_WORKLOAD, fixed=None)
    swept = [simulate(SMALL_WORKLOAD, fixed=number) for number in (16, 32, 48, 64, 80, 96, 128)]
    assert adaptive.preempted_share < 0.04
    calm = [outcome for outcome in swept if outcome.preempted_share <= adaptive.preempted_share]
    assert 1 <= len(calm) < len(swept)
    assert adaptive.tokens_per_second > max(outcome.tokens_per_second for outcome in calm)
    assert adaptive.tokens_per_second > 0.9 * max(outcome.tokens_per_second for outcome in swept)
