"""The built-in rules of form: tags, length, repetition."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.rewards import FunctionReward, RewardItem, RewardResult, ScoreStatus
from penstock.rewards.local import LocalModel
from penstock.v1 import types_pb2
from services.reward.config import ModelConfig, RewardModelConfig
from services.reward.models.build import BUILT_IN, BuiltInSettings, build_model
from services.reward.models.config import FormatConfig, LengthConfig, NgramRepetitionConfig
from services.reward.models.format import has_format
from services.reward.models.length import length_value
from services.reward.models.ngram_repetition import repeated_share
from tests.helpers.brokers.scripted_scoring import scoring_item

OK = types_pb2.SCORE_STATUS_OK
STRICT = {"allows_other_text": False}
OPENED = {"opened_by_prompt": True}


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        ("<think>a</think><answer>4</answer>", {}, True),
        ("  <think></think>\n<answer></answer>\n", STRICT, True),
        ("so <think>a</think> then <answer>4</answer>.", {}, True),
        ("so <think>a</think><answer>4</answer>", STRICT, False),
        ("<think>a</think> then <answer>4</answer>", STRICT, False),
        ("<think>a</think><answer>4</answer>.", STRICT, False),
        ("a</think><answer>4</answer>", OPENED, True),
        ("a</think><answer>4</answer>", OPENED | STRICT, True),
        ("<think>a</think><answer>4</answer>", OPENED, False),
        ("", {}, False),
        ("", OPENED, False),
        ("<think>a<answer>4</answer>", {}, False),
        ("<think>a</think><answer>4", {}, False),
        ("<answer>4</answer><think>a</think>", {}, False),
        ("<think><answer>4</answer></think>", {}, False),
        ("</think><think><answer>4</answer>", {}, False),
        ("<think>a</think><think>b</think><answer>4</answer>", {}, False),
        ("<think>a</think><answer>4</answer></answer>", {}, False),
        ("< think>a</think><answer>4</answer>", {}, False),
        ("<THINK>a</THINK><answer>4</answer>", {}, False),
        ("<think>\u4e2d\U0001f600\x00</think>\u2003<answer>\u00fc</answer>", STRICT, True),
    ],
)
def test_tags_occur_once_closed_and_in_order(completion: str, options: dict[str, bool], expected: bool):
    assert has_format(completion, FormatConfig(**options)) is expected


DAPO = {"max_tokens": 100, "buffer_tokens": 20}


@pytest.mark.parametrize(
    ("num_tokens", "options", "expected"),
    [
        (0, DAPO, 0.0),
        (80, DAPO, 0.0),
        (85, DAPO, -0.25),
        (100, DAPO, -1.0),
        (10_000_000, DAPO, -1.0),
        (0, {"target_tokens": 50}, -1.0),
        (25, {"target_tokens": 50}, -0.5),
        (50, {"target_tokens": 50}, 0.0),
        (60, {"target_tokens": 50}, -0.2),
        (1000, {"target_tokens": 50}, -1.0),
    ],
)
def test_length_falls_to_minus_one(num_tokens: int, options: dict[str, int], expected: float):
    assert length_value(num_tokens, LengthConfig(**options)) == pytest.approx(expected)


def test_length_is_the_trainers_own_overlong_penalty():
    import numpy as np

    from services.trainer.algorithms.terms.overlong import overlong_penalties

    counts = np.arange(0, 130)
    theirs = overlong_penalties(counts, max_tokens=np.full(130, 100), buffer_tokens=20)
    assert [length_value(int(count), LengthConfig(**DAPO)) for count in counts] == pytest.approx(theirs.tolist())


@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens": 9}, {"buffer_tokens": 9}, {"max_tokens": 9, "buffer_tokens": 10}, DAPO | {"target_tokens": 5}],
)
def test_a_length_that_is_no_rule_is_refused(options: dict[str, int]):
    with pytest.raises(ValidationError, match=r"tokens"):
        LengthConfig(**options)


@pytest.mark.parametrize(
    ("units", "n", "expected"),
    [
        ([], 1, 0.0),
        (["a"], 1, 0.0),
        (["a", "b", "c"], 3, 0.0),
        (["a", "b", "c"], 4, 0.0),
        (["a", "a", "a", "a"], 1, 0.75),
        (["a", "b", "a", "b", "a"], 2, 0.5),
        ([1, 2, 3, 1, 2, 3], 3, 0.25),
    ],
)
def test_the_share_of_ngrams_seen_before(units: list[str] | list[int], n: int, expected: float):
    assert repeated_share(units, n) == expected


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_repetition_is_counted_as_by_listing_every_ngram(units: list[int], n: int):
    ngrams = [tuple(units[start : start + n]) for start in range(len(units) - n + 1)]
    repeated = sum(ngram in ngrams[:index] for index, ngram in enumerate(ngrams))
    assert repeated_share(units, n) == pytest.approx(repeated / len(ngrams) if len(ngrams) > 1 else 0.0)


def rule(name: str, **sections: object) -> Callable[[RewardItem], object]:
    return BUILT_IN[name](BuiltInSettings(config=ModelConfig.model_validate({"model": name, **sections})))._function


def test_repetition_is_of_words_whatever_their_case_or_of_tokens_up_to_a_cap():
    words = rule("ngram_repetition", ngram_repetition={"n": 2})
    assert words(RewardItem(completion="Stra\u00dfe zu  STRASSE\nzu stra\u00dfe")) == pytest.approx(-0.5)
    assert words(RewardItem(completion="")) == 0.0
    capped = rule("ngram_repetition", ngram_repetition={"n": 1, "cap": 0.25, "unit": "tokens"})
    assert capped(RewardItem(completion="aaa", token_ids=[7, 7, 7])) == -0.25


@pytest.mark.parametrize(
    ("name", "sections"),
    [("length", {"length": {"target_tokens": 5}}), ("ngram_repetition", {"ngram_repetition": {"unit": "tokens"}})],
)
async def test_without_token_ids_tokens_are_not_counted(name: str, sections: dict[str, object]):
    model = LocalModel(BUILT_IN[name](BuiltInSettings(config=ModelConfig.model_validate({"model": name, **sections}))))
    assert (await model.describe()).wants_token_ids
    item = scoring_item(0)
    item.ClearField("token_ids")
    (score,) = await model.score([item], timeout_s=5)
    assert score.status == types_pb2.SCORE_STATUS_INVALID
    assert "came without token ids" in score.message


MEGABYTE = 1 << 20
HUGE = {
    "tags that open": "<think>" * (MEGABYTE // 7),
    "almost tags": "<thin" * (MEGABYTE // 5),
    "one word": "a" * MEGABYTE,
    "short words": "a b " * (MEGABYTE // 4),
    "different words": " ".join(map(str, range(MEGABYTE // 7))),
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_megabyte_takes_no_more_than_its_share_of_time(text: str):
    def used_s(part: str) -> float:
        item = RewardItem(completion=part)
        begun_s = time.process_time()
        for each in (rule("format"), rule("ngram_repetition", ngram_repetition={"n": 40})):
            each(item)
        return time.process_time() - begun_s

    # Quadratic, sixteen times the text would take 256 times as long.
    small_s = min(used_s(text[: MEGABYTE // 16]) for _ in range(3))
    assert used_s(text) < 64 * max(small_s, 0.002)


@pytest.mark.parametrize(("policy", "status"), [("wrong", OK), ("drop", types_pb2.SCORE_STATUS_CANDIDATE_LIMIT)])
async def test_a_limit_that_a_candidate_exceeded_is_wrong_or_dropped_as_stated(
    monkeypatch: pytest.MonkeyPatch, policy: str, status: int
):
    exceeding = FunctionReward(lambda completion: RewardResult(status=ScoreStatus.CANDIDATE_LIMIT), name="toy")
    monkeypatch.setitem(BUILT_IN, "toy", lambda _: exceeding)
    alone = {"model": "toy", "candidate_limit": policy}
    for stated, value, component in ((alone, 0.0, ""), ({"parts": [alone, {"model": "exact_match"}]}, 1.0, "toy/")):
        model = build_model(RewardModelConfig.model_validate(stated))
        (score,) = await model.score([scoring_item(0)], timeout_s=5)
        assert score.status == status
        assert score.HasField("value") == (policy == "wrong")
        if policy == "wrong":
            assert (score.value, score.components[f"{component}exceeded_limit"]) == (value, 1.0)


def test_settings_of_rules_are_bounded():
    for wrong in ({"n": 0}, {"n": 65}, {"cap": 0}, {"cap": 1.5}, {"unit": "letters"}):
        with pytest.raises(ValidationError):
            NgramRepetitionConfig.model_validate(wrong)
    for wrong in ({"tags": []}, {"tags": ["<a>"]}, {"tags": ["a\nb"]}, {"tags": ["a" * 33]}):
        with pytest.raises(ValidationError):
            FormatConfig.model_validate(wrong)
