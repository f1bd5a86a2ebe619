"""What is kept of work that was not sampled: all that fails or is slow, while that is little, in bounded memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from penstock import tracing
from penstock.tracing import measuring as measuring_module
from penstock.tracing.counters import LOST
from penstock.tracing.measuring import _Details, measuring_detail
from penstock.tracing.tail import MAX_TAIL, MIN_SEEN, SLOW_FACTOR, TAIL_PER_S, TailBudget
from tests.helpers.traces import spans_in, tracing_to


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_module, "_details", _Details())


def test_all_that_fails_is_kept_until_it_fails_faster_than_it_may():
    budget, before = TailBudget(), LOST.labels("budget")._value.get()
    now_s, kept = 1e9, 0
    budget.earn(now_s)
    for _ in range(1000):
        now_s += 1 / TAIL_PER_S
        budget.earn(now_s)
        kept += budget.affords(1)
    assert kept == 1000
    # A grader that is broken for a day, at a thousand a second, and a clock that is set back meanwhile.
    kept = 0
    for second in range(24 * 3600):
        now_s += -3600 if second == 9 else 1
        budget.earn(now_s)
        kept += 1000 * budget.affords(1000)
    assert 0 < kept <= MAX_TAIL + 24 * 3600 * TAIL_PER_S
    assert LOST.labels("budget")._value.get() - before == 24 * 3600 * 1000 - kept
    budget.earn(now_s + 1e9)
    assert sum(budget.affords(1) for _ in range(3000)) == MAX_TAIL


def test_a_detail_is_kept_if_its_sample_is_sampled_or_it_fails_or_is_slow(tmp_path, monkeypatch):
    clock = {"now_s": 0.0}
    monkeypatch.setattr(measuring_module.time, "monotonic", lambda: clock["now_s"])
    sampled = tracing.group_context("r", "sampled")
    other = replace(tracing.group_context("r", "other"), is_sampled=False).traceparent

    def work(name: str, took_s: float, sample: str = other, *, fails: bool = False) -> None:
        with measuring_detail(name, {}, sample=sample) as measured:
            clock["now_s"] += took_s
            measured.error = "it broke" if fails else ""

    with tracing_to(tmp_path, ratio=0.0):
        tracemalloc.start()
        for number in range(20_000):
            work("rl.usual", 1.0 + number % 2)
            if number == 1000:
                first_bytes, _ = tracemalloc.get_traced_memory()
        last_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        work("rl.usual", 1.5 * SLOW_FACTOR + 1)
        work("rl.usual", 1.0, fails=True)
        work("rl.usual", 1.0, sampled.traceparent)
        # Of another kind nothing is known yet.
        for _ in range(MIN_SEEN):
            work("rl.new", 100.0)
    slow, failed, chosen = spans_in(tmp_path)
    assert {each.name for each in (slow, failed, chosen)} == {"rl.usual"}
    assert int(slow.span["endTimeUnixNano"]) - int(slow.span["startTimeUnixNano"]) > 8e9
    assert failed.span["status"]["message"] == "it broke"
    assert chosen.span["parentSpanId"] == f"{sampled.span_id:016x}"
    assert last_bytes - first_bytes < 100_000
