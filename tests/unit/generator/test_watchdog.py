from __future__ import annotations

from services.generator.watchdog import DecodeWatch


def test_silence_counts_from_the_last_token():
    watch = DecodeWatch()
    assert watch.silent_s(is_awaited=True, signs=0, now_s=10.0) == 0.0
    assert watch.silent_s(is_awaited=True, signs=0, now_s=14.0) == 4.0
    assert watch.silent_s(is_awaited=True, signs=1, now_s=15.0) == 0.0
    assert watch.silent_s(is_awaited=True, signs=1, now_s=17.5) == 2.5


def test_an_engine_that_owes_nothing_may_be_silent():
    watch = DecodeWatch()
    assert watch.silent_s(is_awaited=False, signs=7, now_s=0.0) == 0.0
    assert watch.silent_s(is_awaited=False, signs=7, now_s=1000.0) == 0.0
    # What was not waited for before it began is not held against it.
    assert watch.silent_s(is_awaited=True, signs=7, now_s=2000.0) == 0.0
    assert watch.silent_s(is_awaited=True, signs=7, now_s=2001.0) == 1.0
