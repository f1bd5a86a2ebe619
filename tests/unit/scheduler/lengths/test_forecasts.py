"""The forecaster as calls see it, over the real fits: cold start, models, drift, restarts."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.ranker.made_set import make_set
from penstock.clock import ManualClock
from penstock.errors import InvalidFieldError, UnknownRunError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths import forecaster as forecaster_module
from services.scheduler.lengths.forecaster import LengthForecaster
from services.scheduler.lengths.length_model import FitFailedError
from services.scheduler.lengths.metrics import LengthMetrics
from services.scheduler.lengths.quality import recall_of_longest
from services.scheduler.lengths.ridge import RidgeLearner
from services.scheduler.lengths.state_files import StateFiles

MADE = make_set(seed=0, num_prompts=2000)
FITTED, TESTED = MADE[:1600], MADE[1600:]


def make(**options):
    options = {"learners": [RidgeLearner()], **options}
    return LengthForecaster(clock=ManualClock(), metrics=LengthMetrics(CollectorRegistry()), **options)


def query(name, prompt=None):
    words = prompt.words.tobytes() if prompt is not None else b""
    return pb.LengthQuery(group_id=name, prompt_token_ids=words)


def seen(name, num_tokens, prompt=None):
    return pb.LengthObservation(query=query(name, prompt), num_completion_tokens=num_tokens)


async def forecasts(forecaster, queries):
    return (await forecaster.forecast("r", queries))[0]


async def taught(made=FITTED, **options):
    forecaster = make(**options)
    await forecaster.observe("r", [seen(f"g{index}", each.length, each.prompt) for index, each in enumerate(made)])
    await forecaster.refresh()
    return forecaster


async def asked_of(forecaster):
    answers = await forecasts(forecaster, [query(f"t{index}", each.prompt) for index, each in enumerate(TESTED)])
    return np.array([answer.expected_tokens for answer in answers])


async def test_before_there_is_a_model_means_are_forecast():
    forecaster = make()
    assert not (await forecasts(forecaster, [query("a")]))[0].HasField("expected_tokens")
    await forecaster.observe("r", [seen("a", 10), seen("a", 30), seen("b", 80)])
    own, overall = await forecasts(forecaster, [query("a"), query("c")])
    assert own.expected_tokens == pytest.approx(20)
    assert own.deviation_tokens == pytest.approx(np.std([10, 30], ddof=1))
    assert overall.expected_tokens == pytest.approx(40)
    assert forecaster.describe("r").model_version == 0
    with pytest.raises(UnknownRunError):
        forecaster.describe("another")


async def test_lengths_that_come_by_group_are_learned_for_the_prompt_that_was_asked_about():
    forecaster, prompt = make(), FITTED[0].prompt
    await forecasts(forecaster, [query("step-1", prompt)])
    await forecaster.observe("r", [seen("step-1", 50), seen("step-2", 10)])
    (again,) = await forecasts(forecaster, [query("step-9", prompt)])
    assert again.expected_tokens == pytest.approx(50)
    assert forecaster.describe("r").num_prompts == 1


async def test_a_fit_finds_the_longest_where_the_prompt_shows_them():
    forecaster = await taught()
    lengths = np.array([float(each.length) for each in TESTED])
    oracle = recall_of_longest(lengths, np.array([each.shown for each in TESTED]), 0.2)
    found = recall_of_longest(lengths, await asked_of(forecaster), 0.2)
    baseline = recall_of_longest(lengths, np.array([float(each.prompt.num_tokens) for each in TESTED]), 0.2)
    assert 0.86 < oracle < 0.95
    assert found >= 0.81
    assert baseline < 0.4
    described = forecaster.describe("r")
    assert (described.model, described.model_version, described.num_prompts) == ("ridge", 1, len(FITTED))
    model, length_alone = described.qualities
    assert (model.forecaster, length_alone.forecaster) == ("ridge", "prompt_length")
    assert model.recall_longest_20_percent > 0.75
    assert length_alone.recall_longest_20_percent < 0.4
    assert 0.7 < model.interval_coverage < 0.9
    assert model.mean_absolute_error_tokens < length_alone.mean_absolute_error_tokens / 2
    for bucket in model.buckets:
        assert bucket.expected_tokens == pytest.approx(bucket.mean_tokens, rel=0.25)


async def test_when_lengths_double_the_order_suffers_less_than_the_tokens():
    forecast = await asked_of(await taught())
    before = np.array([float(each.length) for each in TESTED])
    after = before * 2 * np.exp(np.random.default_rng(0).normal(0, 0.2, len(before)))
    loss_of_rank = 1 - recall_of_longest(after, forecast, 0.2) / recall_of_longest(before, forecast, 0.2)
    rise_of_error = np.abs(after - forecast).mean() / np.abs(before - forecast).mean() - 1
    assert loss_of_rank < 0.15
    assert rise_of_error > 1.5


async def test_forecasts_are_tested_by_what_comes_after_them():
    forecaster = await taught()
    answers = await forecasts(forecaster, [query(f"t{index}", each.prompt) for index, each in enumerate(TESTED)])
    await forecaster.observe("r", [seen(f"t{index}", each.length) for index, each in enumerate(TESTED)])
    after = [each for each in forecaster.describe("r").qualities if each.test == pb.LENGTH_TEST_PREQUENTIAL]
    assert [each.forecaster for each in after] == ["ridge", "prompt_length"]
    assert after[0].num_samples == len(TESTED)
    inside = [a.low_tokens <= each.length <= a.high_tokens for a, each in zip(answers, TESTED, strict=True)]
    assert after[0].interval_coverage == pytest.approx(np.mean(inside))
    assert 0.7 < after[0].interval_coverage < 0.9
    assert after[0].recall_longest_20_percent > 0.75


async def test_own_lengths_of_a_prompt_correct_the_model():
    forecaster, prompt = await taught(), TESTED[0].prompt
    (fresh,) = await forecasts(forecaster, [query("a", prompt)])
    long = round(4 * fresh.expected_tokens)
    await forecaster.observe("r", [seen("a", long) for _ in range(8)])
    (corrected,) = await forecasts(forecaster, [query("b", prompt)])
    assert fresh.expected_tokens * 2 < corrected.expected_tokens <= long * 1.2
    uncertainty = [each.deviation_tokens / each.expected_tokens for each in (fresh, corrected)]
    assert uncertainty[1] < uncertainty[0] / 2


async def test_a_group_that_is_asked_about_again_is_tested_by_its_first_forecast():
    forecaster, prompt = await taught(), TESTED[0].prompt
    (first,) = await forecasts(forecaster, [query("a", prompt)])
    long = round(4 * first.expected_tokens)
    await forecaster.observe("r", [seen("a", long)] * 8)
    (second,) = await forecasts(forecaster, [query("a", prompt)])
    assert second.expected_tokens > 2 * first.expected_tokens
    await forecaster.observe("r", [seen("a", long)])
    quality = next(e for e in forecaster.describe("r").qualities if e.test == pb.LENGTH_TEST_PREQUENTIAL)
    assert (quality.num_samples, quality.mean_absolute_error_tokens) == (9, pytest.approx(long - first.expected_tokens))


async def test_what_was_learned_outlives_the_process(tmp_path):
    first = await taught(files=StateFiles(tmp_path))
    again = make(files=StateFiles(tmp_path))
    assert again.describe("r") == first.describe("r")
    assert np.array_equal(await asked_of(again), await asked_of(first))


async def test_a_damaged_file_is_left_out(tmp_path):
    await taught(files=StateFiles(tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole.replace(b"PK", b"KP"), b"\x80\x04N."):
        path.write_bytes(damaged)
        with pytest.raises(UnknownRunError):
            make(files=StateFiles(tmp_path)).describe("r")


async def test_a_run_may_begin_with_pairs_of_another():
    pairs = [(each.prompt, float(np.log(each.length))) for each in FITTED]
    forecaster = make(first_pairs=pairs)
    await forecasts(forecaster, [query("a")])
    await forecaster.refresh()
    lengths = np.array([float(each.length) for each in TESTED])
    assert recall_of_longest(lengths, await asked_of(forecaster), 0.2) >= 0.81
    assert forecaster.describe("r").num_observations == 0


async def test_a_fit_waits_until_enough_is_new():
    forecaster = await taught(FITTED[:100])
    await forecaster.refresh()
    assert forecaster.describe("r").model_version == 1
    await forecaster.observe("r", [seen("more", 5, each.prompt) for each in FITTED[:64]])
    await forecaster.refresh()
    assert forecaster.describe("r").model_version == 2


class Broken:
    """Its fits fail, or its models do."""

    name = "broken"
    needs_text = False
    strengths = (1.0,)

    def __init__(self, *, can_fit):
        self.can_fit = can_fit

    def fit(self, prompts, targets, weights, *, strength):
        if not self.can_fit:
            raise FitFailedError("no memory")
        return self

    def close(self):
        pass

    def predict(self, prompts):
        if self.can_fit and len(prompts) == len(TESTED):
            raise FitFailedError("gone")
        return np.full(len(prompts), 5.0)


@pytest.mark.parametrize("can_fit", [False, True])
async def test_where_one_model_fails_the_next_answers(can_fit):
    forecaster = await taught(learners=[Broken(can_fit=can_fit), RidgeLearner()])
    lengths = np.array([float(each.length) for each in TESTED])
    assert recall_of_longest(lengths, await asked_of(forecaster), 0.2) >= 0.81
    assert forecaster.describe("r").fit_problem == ("" if can_fit else "broken: no memory")


async def test_runs_and_impossible_lengths_are_bounded(monkeypatch):
    monkeypatch.setattr(forecaster_module, "MAX_RUNS", 2)
    forecaster = make()
    for run_id in ("a", "b", "c"):
        await forecaster.observe(run_id, [seen("g", 1)])
    with pytest.raises(UnknownRunError):
        forecaster.describe("a")
    with pytest.raises(InvalidFieldError):
        await forecaster.observe("b", [seen("g", 1), seen("g", 1 << 25)])
    assert forecaster.describe("b").num_observations == 1
