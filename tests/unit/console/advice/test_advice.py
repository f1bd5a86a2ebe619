"""Advice on recorded runs whose cause is known, and on numbers that are odd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from console.advice.measured import MIN_STEPS, WARM_UP_STEPS, Occupancy, measure
from console.advice.of_run import final_advice, live_advice
from console.advice.rules import MAX_SENTENCES
from penstock.v1 import broker_pb2

RECORDED = Path(__file__).parent / "recorded"
"""Real runs of emulated generators and a tiny trainer on two busy cores: the numbers that advice reads."""


def advice_on(name: str, **changes: Any) -> list[str]:
    run = json.loads((RECORDED / f"{name}.json").read_text())
    return [one.text for one in final_advice(run["lines"], run["summary"] | changes)]


def steps(count: int = 20, **values: float) -> list[dict[str, Any]]:
    """Lines of steps of ten seconds, in which a trainer computes half of the time."""
    line = {"time/step_s": 10.0, "time/train_s": 5.0, "step/groups": 8.0, **values}
    return [{"policy_version": version, **line} for version in range(1, count + 1)]


def occupancy(idle: float, *, count: int = 2, **in_flight: float) -> dict[str, Any]:
    return {"in_flight_mean": in_flight, "num_generators": count, "idle_mean": idle}


def test_slow_generators_are_to_be_more():
    assert advice_on("slow_generators") == [
        "the trainer waited 94 % of the time for samples while 2 generators decoded 99 % of it: add a generator "
        "(at most +50 %)"
    ]


def test_sides_that_wait_for_each_other_are_to_run_further_apart():
    [text] = advice_on("lockstep_with_a_tail")
    assert text.endswith("raise algorithm.max_staleness from 0 to 1")
    assert "mostly for the longest samples (181 tokens, 41 on average)" in text


def test_generators_that_are_not_needed_may_go():
    assert advice_on("spare_generators") == [
        "4 generators were idle for 92 % and the trainer never waited: 3 of them could go, or the trainer needs "
        "more processes"
    ]


def test_rewards_that_never_differ_are_named_first():
    text = advice_on("one_reward")[0]
    assert text.startswith("100 % of the groups taught nothing: all their samples had one reward (mean 1.00)")


def test_a_run_without_a_fault_gets_no_advice():
    lines = steps(
        **{"time/train_s": 9.5, "wait/samples_s": 0.4, "step/pack_fill": 0.9, "step/zero_variance_groups": 2.0}
    )
    assert final_advice(lines, {"occupancy": occupancy(0.2), "max_staleness": 1, "audit": {"trained": 100}}) == []


@pytest.mark.parametrize(
    ("line", "summary", "expected"),
    [
        (
            {"wait/samples_s": 5.0},
            {"occupancy": occupancy(0.9, finished=40.0, scoring=30.0, leased=10.0)},
            "88 % of the unscored ones were waiting for their score: add reward workers",
        ),
        (
            {"wait/checkpointing_s": 2.0},
            {},
            "waited 20 % of the time for checkpointing: raise run.checkpoint_every_steps",
        ),
        ({"wait/critic_s": 4.0}, {}, "waited 40 % of the time for its critic"),
        (
            {"time/train_s": 9.9, "step/pack_fill": 0.2},
            {},
            "packs filled to 20 %: raise trainer.max_groups_per_microbatch",
        ),
        (
            {},
            {"audit": {"trained": 80, "dropped": {"stale": 20}}},
            "20 % of the samples were dropped (stale, 20): raise",
        ),
    ],
)
def test_other_causes_are_named(line, summary, expected):
    [advice] = final_advice(steps(**line), summary)
    assert expected in advice.text
    assert all(math.isfinite(value) for value in advice.numbers.values())


def test_the_most_worthwhile_comes_first_and_there_are_few():
    waits = {
        f"wait/{cause}_s": seconds for cause, seconds in (("publishing", 1.5), ("checkpointing", 3.0), ("critic", 2.5))
    }
    found = final_advice(steps(**waits, **{"step/zero_variance_groups": 7.0}), {})
    assert [round(advice.stake, 3) for advice in found] == [0.875, 0.3, 0.25]
    assert len(found) == MAX_SENTENCES


def test_what_was_not_measured_gives_no_advice():
    assert final_advice(steps(WARM_UP_STEPS + MIN_STEPS - 1, **{"wait/samples_s": 9.0}), {}) == []
    holes = [{"policy_version": 1, "time/step_s": float("nan"), "wait/samples_s": None, "step/groups": "x"}] * 20
    assert final_advice(holes, {"occupancy": None, "audit": None}) == []
    assert measure([], occupancy=None, audit=None, max_staleness=None) is None


def test_while_a_run_is_under_way_the_broker_s_answer_counts():
    run = broker_pb2.GetRunResponse(
        audit=broker_pb2.Audit(in_flight_by_state={"finished": 60, "scoring": 30, "leased": 10}),
        generators=[broker_pb2.GeneratorView()],
    )
    [advice] = live_advice(steps(**{"wait/samples_s": 5.0}), run, idle_ratio=0.5)
    assert "90 % of the unscored ones were waiting for their score" in advice.text


def test_occupancy_is_the_mean_over_the_polls():
    seen = Occupancy()
    seen.add({"leased": 10, "scored": 0}, num_generators=1, idle_ratio=None)
    seen.add({"leased": 20}, num_generators=2, idle_ratio=0.5)
    assert seen.document() == {"in_flight_mean": {"leased": 15.0}, "num_generators": 2, "idle_mean": 0.5}
