from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from services.broker.dispatch import auto as auto_module
from services.broker.dispatch.auto import ALIKE, MIN_GAIN, Auto, Candidates, looks_ahead
from services.broker.dispatch.calibration import normal
from services.broker.dispatch.dealing.table import Table
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.length_draws import Draw
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import DispatchPolicy, Order, Prompt, QueuedGroup, Rule, Situation, Work
from services.broker.dispatch.streamrl import StreamRl
from services.broker.rules.sample_policy import DISPATCH_NAMES

FAST = LatencyModel(base_s=0.01, per_sample_s=0.0001)
SLOW = FAST.scaled(10.0)


def load_of(model: LatencyModel = FAST, *remaining: float, max_samples: int = 8) -> Load:
    """A generator that holds samples of these lengths."""
    load = Load(model=model, max_samples=max_samples, max_leases=max_samples)
    for tokens in remaining:
        load.add(tokens, 0.0)
    return load


def situation_of(loads: dict[str, Load], lengths: Sequence[float], *, error: float = 0.0) -> Situation:
    """The queue holds one sample of each length; nobody asks yet."""
    queue = LengthCounts()
    for tokens in lengths:
        queue.add(tokens)
    return Situation(
        asking=min(loads),
        loads=loads,
        queue=queue,
        under_way=LengthCounts(),
        mean_tokens=100.0,
        has_forecasts=any(lengths),
        has_speeds=True,
        length_error=error,
        calibration=normal(shared_error=0.0, own_error=error),
        prompts=[Prompt(predicted_tokens=tokens, num_queued=1) for tokens in lengths],
    )


def dealt(
    policy: DispatchPolicy, loads: dict[str, Load], lengths: Sequence[float], *, error: float = 0.0
) -> dict[str, list[float]]:
    """Which samples each generator gets when the queue is dealt."""
    situation = situation_of(loads, lengths, error=error)
    policy.review(situation)
    rule = policy.rule(situation)
    assert rule is not None
    table = Table(rule, length_error=error)
    for name, load in loads.items():
        table.put(name, load, policy_version=0, is_here=True)
    table.see_queue(situation.queue, situation.mean_tokens)
    table.measure_faster({0})
    found: dict[str, list[float]] = {name: [] for name in loads}
    for tokens in sorted(lengths, reverse=True) if rule.order is Order.LENGTH else lengths:
        work = Work(num_samples=1, context_tokens=0, length_tokens=tokens, remaining_tokens=tokens or 100.0)
        member = table.first_done(work, table.kinds)
        if member is not None:
            table.add(member, work)
            found[member.name].append(tokens)
    return found


def test_every_name_makes_its_policy() -> None:
    assert [make_policy(name).name for name in DISPATCH_NAMES] == list(DISPATCH_NAMES)
    with pytest.raises(ValueError, match="best"):
        make_policy("best")


def test_fifo_has_no_rule_by_which_to_deal() -> None:
    assert make_policy("fifo").rule(situation_of({"a": load_of(), "b": load_of()}, [1, 2])) is None


def test_least_loaded_shares_equal_work_between_equal_generators() -> None:
    found = dealt(make_policy("least_loaded"), {"a": load_of(), "b": load_of()}, [0] * 8)
    assert (len(found["a"]), len(found["b"])) == (4, 4)


def test_a_slow_generator_leaves_a_sample_to_a_faster_idle_one() -> None:
    loads = {"a-slow": load_of(SLOW), "b-fast": load_of(FAST)}
    assert dealt(make_policy("least_loaded"), loads, [100]) == {"a-slow": [], "b-fast": [100]}


def test_a_slow_generator_leaves_the_last_sample_to_a_faster_one_that_is_soon_free() -> None:
    # Full, but free after 50 tokens (about 0.5 s); alone the slow one would take ten seconds.
    loads = {"a-slow": load_of(SLOW), "b-fast": load_of(FAST, *[50] * 8)}
    assert dealt(make_policy("least_loaded"), loads, [100])["a-slow"] == []


def test_a_slow_generator_helps_with_a_long_queue() -> None:
    loads = {"a-slow": load_of(SLOW), "b-fast": load_of(FAST, *[100] * 8)}
    assert len(dealt(make_policy("least_loaded"), loads, [100] * 400)["a-slow"]) == 8


def test_lpt_gives_the_longest_first_and_spreads_them() -> None:
    found = dealt(make_policy("lpt"), {"a": load_of(), "b": load_of()}, [10, 500, 20, 400, 30, 40])
    assert (found["a"][0], found["b"][0]) == (500, 400)
    assert sorted(found["a"] + found["b"]) == [10, 20, 30, 40, 400, 500]


def test_streamrl_keeps_the_longest_fifth_apart() -> None:
    lengths = [1000.0, 900.0] + [100.0] * 8
    policy = StreamRl()
    found = dealt(policy, {"a": load_of(), "b": load_of()}, lengths)
    assert policy.long_tail_ids == {"a"}
    assert found == {"a": [1000.0, 900.0], "b": [100.0] * 8}


def test_streamrl_helps_the_other_part_once_its_own_is_done() -> None:
    # One sample of the long tail and nine others for eight slots: the long-tail instance has three left.
    loads = {"a": load_of(max_samples=4), "b": load_of(max_samples=4)}
    found = dealt(StreamRl(), loads, [1000.0] + [100.0] * 9)
    assert found == {"a": [1000.0], "b": [100.0] * 4}
    # The next time none of the long tail is queued.
    table = Table(
        Rule(order=Order.LENGTH, threshold=500.0, long_tail_ids=frozenset({"a"})),
        length_error=0.0,
    )
    for name, load in loads.items():
        table.put(name, load, policy_version=0, is_here=True)
    table.see_queue(situation_of(loads, [100.0] * 5).queue, 100.0)
    work = Work(num_samples=5, context_tokens=0, length_tokens=100, remaining_tokens=100)
    helper = table.first_done(work, table.kinds)
    assert helper is not None
    assert helper.name == "a"


def test_streamrl_sets_nothing_apart_where_lengths_are_alike() -> None:
    policy = StreamRl()
    policy.review(situation_of({"a": load_of(), "b": load_of()}, [100.0] * 10))
    assert policy.long_tail_ids == frozenset()


def test_auto_is_fifo_while_nothing_is_known() -> None:
    auto = Auto()
    nothing = situation_of({"a": load_of(), "b": load_of()}, [0.0] * 4)
    unknown = Situation(
        asking="a",
        loads=nothing.loads,
        queue=nothing.queue,
        under_way=nothing.under_way,
        mean_tokens=100.0,
        has_forecasts=False,
        has_speeds=False,
    )
    auto.review(unknown)
    assert auto.picked is not None
    assert auto.picked.name == "fifo"
    assert Auto().rule(unknown) is None


def picked_by(auto: Auto, situation: Situation) -> str:
    auto.review(situation)
    assert auto.picked is not None
    return auto.picked.name


def test_auto_sets_the_long_tail_apart_where_that_is_sooner() -> None:
    loads = {name: load_of(max_samples=256) for name in "abcd"}
    situation = situation_of(loads, [1000.0] * 4 + [100.0] * 240)
    assert picked_by(Auto(), situation) == "streamrl"
    times_s = looks_ahead(situation, ALIKE)
    assert times_s["streamrl"] < (1 - MIN_GAIN) * times_s["lpt"]


def test_auto_trusts_forecasts_as_far_as_they_were_right() -> None:
    slow = FAST.scaled(2.5)
    loads = {"a": FAST, "b": FAST, "c": slow, "d": slow}
    lengths = [300.0] * 4 + [60.0] * 200

    def pick(error: float) -> str:
        situation = situation_of(
            {name: load_of(model, max_samples=64) for name, model in loads.items()}, lengths, error=error
        )
        return picked_by(Auto(), situation)

    assert (pick(0.0), pick(0.8)) == ("streamrl", "lpt")


def test_where_steps_overlap_auto_counts_how_soon_most_samples_are_done() -> None:
    """`lpt` keeps the fast generators, which hold the long samples, free of short ones: they are done three times later
    on slow ones. The step's end is 8 % sooner for it; the next step, which begins when most samples are done, is not.
    """
    loads = {f"fast-{index}": load_of(max_samples=64) for index in range(3)}
    loads |= {f"slow-{index}": load_of(FAST.scaled(3.0)) for index in range(9)}
    situation = situation_of(loads, [1000.0] * 6 + [150.0] * 30)
    assert picked_by(Auto(), situation) == "lpt"
    assert picked_by(Auto(), replace(situation, steps_overlap=True)) == "fifo"


def test_a_race_gives_up_what_is_worse_for_sure_and_plays_on_where_it_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    plays: dict[str, int] = {}

    class Named(LongestFirst):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def play(policy: DispatchPolicy, situation: Situation, draw: Draw, _budget: object) -> float:
        """Seconds that vary much from draw to draw, for all together; `close` is as often better as it is worse."""
        plays[policy.name] = number = plays.get(policy.name, 0) + 1
        worse = {"good": 0.0, "twin": 0.0, "close": (-1) ** number, "worse": 2.0 + 0.1 * number, "hopeless": 40.0}
        return 100.0 + 10.0 * (number % 3) + worse[policy.name]

    monkeypatch.setattr(auto_module, "cost_s", play)
    candidates = {name: partial(Named, name) for name in ("good", "twin", "close", "worse", "hopeless")}
    times_s = looks_ahead(situation_of({"a": load_of()}, [100.0] * 8, error=0.5), candidates)
    assert plays == {"good": 16, "twin": 6, "close": 16, "worse": 6, "hopeless": 1}
    assert times_s["twin"] == times_s["good"] == pytest.approx(times_s["close"])
    assert times_s.keys() == {"good", "twin", "close"}


def test_auto_keeps_its_policy_where_another_is_no_better() -> None:
    auto = Auto()
    loads = {name: load_of(max_samples=256) for name in "abcd"}
    assert picked_by(auto, situation_of(loads, [1000.0] * 4 + [100.0] * 240)) == "streamrl"
    # All are the same here; a fresh one takes lpt.
    alike = situation_of(loads, [100.0] * 40)
    assert (picked_by(auto, alike), picked_by(Auto(), alike)) == ("streamrl", "lpt")


def test_auto_looks_ahead_when_the_queue_or_the_fleet_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(situation: Situation, candidates: Candidates, _budget: object) -> dict[str, float]:
        looks.append(situation.queue.num_samples)
        return dict.fromkeys(candidates, 1.0)

    monkeypatch.setattr(auto_module, "looks_ahead", look)
    auto = Auto()
    loads = {"a": load_of(), "b": load_of()}
    for num_queued in (100, 80, 60, 40, 30, 70):
        auto.review(situation_of(loads, [10.0] * num_queued))
    assert looks == [100, 40, 70]
    auto.review(situation_of(loads | {"c": load_of()}, [10.0] * 70))
    assert looks == [100, 40, 70, 70]
    assert picked_by(auto, situation_of({"a": load_of()}, [10.0] * 70)) == "lpt"
    assert looks == [100, 40, 70, 70], "one generator leaves nothing to choose"


def test_auto_stays_with_lpt_where_nothing_is_sooner() -> None:
    auto = Auto()
    auto.review(situation_of({"a": load_of(), "b": load_of()}, [100.0] * 30))
    assert auto.picked is not None
    assert auto.picked.name == "lpt"


def test_auto_shares_by_load_while_only_speeds_are_known() -> None:
    auto = Auto()
    auto.review(situation_of({"a": load_of(), "b": load_of()}, [0.0] * 30))
    assert auto.picked is not None
    assert auto.picked.name == "least_loaded"


def test_a_risky_forecast_keeps_long_samples_off_slow_generators() -> None:
    def taken(error: float) -> int:
        loads = {"a-slow": load_of(FAST.scaled(3.0)), "b-fast": load_of(FAST, *[100] * 8)}
        return len(dealt(make_policy("least_loaded"), loads, [100.0] * 40, error=error)["a-slow"])

    assert taken(0.0) > taken(1.0) == 0


def test_lengths_order_only_the_groups_of_one_step() -> None:
    def rank(sequence: int, tokens: float, *, is_started: bool = False) -> tuple[int, ...]:
        group = QueuedGroup(sequence=sequence, is_evaluation=False, is_started=is_started, predicted_tokens=tokens)
        return group.rank_by_length(4)

    assert rank(4, 500) < rank(1, 100) < rank(2, 100)
    assert rank(1, 1) < rank(5, 10_000), "a later step's group must not overtake"
    assert rank(7, 1, is_started=True) < rank(1, 500)
