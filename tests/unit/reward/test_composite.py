"""A composite reward: weighted sums, statuses, and no part asked twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from penstock.config import ConfigError, validate
from penstock.errors import DeadlineError, InternalError, PenstockError
from penstock.rewards import ModelAwayError
from penstock.v1 import reward_pb2, types_pb2
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.models.composite import RANKED_STATUSES, CompositeModel, Part
from services.reward.pool import ScoringPool
from tests.helpers.brokers.scripted_scoring import scoring_item
from tests.unit.reward.test_pool import FakeModel, FakeSource, run_pool

OK, JUDGE_ERROR = types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_JUDGE_ERROR


class Scripted(FakeModel):
    """A part that gives `answer(item)`, a value, a status or an exception, and keeps which samples it was asked for."""

    def __init__(self, answer: Callable[[reward_pb2.ScoreItem], object]) -> None:
        super().__init__(None)
        self.answer = answer
        self.asked: list[int] = []

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        self.asked += [item.key.sample_index for item in items]
        return [self._score(self.answer(item)) for item in items]

    def _score(self, answer: object) -> types_pb2.Score:
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            return types_pb2.Score(status=OK, value=answer, components={"detail": answer})
        return types_pb2.Score(status=answer, message="said so")


def composite(**parts: tuple[float, Scripted]) -> CompositeModel:
    return CompositeModel([Part(name=name, weight=weight, model=model) for name, (weight, model) in parts.items()])


async def test_values_add_up_by_weight_and_are_components_by_name():
    config = RewardModelConfig.model_validate(
        [
            {"model": "exact_match"},
            {"model": "format", "weight": 0.5, "format": {"tags": ["think"]}},
            {"model": "length", "weight": 2, "length": {"target_tokens": 2}, "name": "brevity"},
        ]
    )
    model = build_model(config)
    item = scoring_item(0, completion="<think>2+2</think> #### 4")
    scores = await model.score([item, scoring_item(1, completion="#### 5")], timeout_s=5)
    assert scores[0].value == 1 + 0.5 * 1 + 2 * -0.5
    assert dict(scores[0].components) == {"exact_match": 1.0, "format": 1.0, "brevity": -0.5}
    assert scores[1].value == 2 * -0.5
    assert scores[0].model == model.name == "exact_match+format+brevity"
    described = await model.describe()
    assert [(part.name, part.weight, part.model) for part in described.parts] == [
        ("exact_match", 1.0, "exact_match"),
        ("format", 0.5, "format"),
        ("brevity", 2.0, "length"),
    ]
    assert described.wants_token_ids
    await model.close()


async def test_components_of_parts_stand_beside_them():
    model = composite(a=(1.0, Scripted(lambda _: 0.25)), b=(-1.0, Scripted(lambda _: 1.0)))
    (score,) = await model.score([scoring_item(0)], timeout_s=5)
    assert (score.value, dict(score.components)) == (-0.75, {"a": 0.25, "b": 1.0, "a/detail": 0.25, "b/detail": 1.0})


async def test_a_status_of_one_part_is_the_wholes_and_never_a_partial_sum():
    # Those of environments come from generators, never from a reward model.
    stated = types_pb2.ScoreStatus.items()
    statuses = [status for name, status in stated if status > OK and "ENVIRONMENT" not in name]
    assert sorted(RANKED_STATUSES) == sorted(statuses)
    for first, second in itertools.product([OK, *statuses], repeat=2):
        answers = [0.5 if status == OK else status for status in (first, second)]
        model = composite(**{name: (1.0, Scripted(lambda _, a=a: a)) for name, a in zip("ab", answers, strict=True)})
        (score,) = await model.score([scoring_item(0)], timeout_s=5)
        unjudged = [status for status in (first, second) if status != OK]
        assert score.status == min(unjudged, key=RANKED_STATUSES.index, default=OK)
        assert score.HasField("value") == (not unjudged)
        assert not unjudged or not score.components
        assert not unjudged or score.message == f"{'a' if score.status == first else 'b'}: said so"


async def test_a_sum_beyond_what_a_reward_may_be_is_no_value():
    model = composite(a=(1e6, Scripted(lambda _: 1e12)))
    (score,) = await model.score([scoring_item(0)], timeout_s=5)
    assert (score.status, score.HasField("value")) == (types_pb2.SCORE_STATUS_FAILED, False)


async def test_a_part_that_has_judged_is_not_asked_again_while_others_are_retried(monkeypatch):
    monkeypatch.setattr("services.reward.pool.backoff_s", lambda: itertools.repeat(0.0))
    failures = {3: 2, 5: 1}

    def judge(item: reward_pb2.ScoreItem) -> object:
        index = item.key.sample_index
        if failures.get(index, 0):
            failures[index] -= 1
            return JUDGE_ERROR
        return 1.0

    rule, judged = Scripted(lambda _: 1.0), Scripted(judge)
    source = FakeSource(8)
    await run_pool(source, composite(rule=(1.0, rule), judge=(1.0, judged)), lambda: not source.held, max_retries=3)
    assert {score.value for score in source.scores.values()} == {2.0}
    assert sorted(rule.asked) == list(range(8))
    assert sorted(judged.asked) == [0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7]


@pytest.mark.parametrize("error", [DeadlineError("slow"), InternalError("broken"), ModelAwayError("refused")])
async def test_a_part_that_does_not_answer_is_asked_again_alone(monkeypatch, error: PenstockError):
    monkeypatch.setattr("services.reward.pool.backoff_s", lambda: itertools.repeat(0.0))
    errors = [error]
    rule = Scripted(lambda _: 1.0)
    model = composite(rule=(1.0, rule), judge=(2.0, Scripted(lambda _: errors.pop() if errors else 1.0)))
    source = FakeSource(4)
    await run_pool(source, model, lambda: not source.held)
    assert {score.value for score in source.scores.values()} == {3.0}
    assert sorted(rule.asked) == [0, 1, 2, 3]


async def test_of_several_errors_the_one_that_costs_no_attempts_is_raised():
    model = composite(
        a=(1.0, Scripted(lambda _: InternalError("broken"))),
        b=(1.0, Scripted(lambda _: DeadlineError("slow"))),
        c=(1.0, Scripted(lambda _: ModelAwayError("refused"))),
    )
    with pytest.raises(ModelAwayError):
        await model.score([scoring_item(0)], timeout_s=5)


async def test_what_must_be_fresh_is_asked_of_every_part_again():
    rule, judge = Scripted(lambda _: 1.0), Scripted(lambda _: JUDGE_ERROR)
    model = composite(rule=(1.0, rule), judge=(1.0, judge))
    canary = scoring_item(0)
    canary.must_be_fresh = True
    for _ in range(2):
        await model.score([canary], timeout_s=5)
    assert rule.asked == [0, 0]


async def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("services.reward.models.composite.MAX_REMEMBERED", 3)
    rule, judge = Scripted(lambda _: 1.0), Scripted(lambda _: JUDGE_ERROR)
    model = composite(rule=(1.0, rule), judge=(1.0, judge))
    items = [scoring_item(number) for number in range(5)]
    for _ in range(2):
        await model.score(items, timeout_s=5)
    assert rule.asked == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ([{"model": "math", "weight": float("nan")}], r"reward.parts.0.weight: .* finite number"),
        ([{"model": "math", "weight": 1e9}], r"reward.parts.0.weight: "),
        ([{"model": "math"}, {"model": "my:math"}], "reward: parts: 2 are called math; give each a name of its own"),
        ([{"model": "grpc://judge:7310"}], "reward.parts.0: name: required for grpc://judge:7310"),
        ([], "reward: an empty list scores nothing"),
        ([{"model": "length"}], "reward.parts.0: length: required by the reward length"),
        ([{"model": "format", "wait": 1}], "reward.parts.0.wait: unknown key; did you mean 'weight'"),
        (
            {"parts": [{"model": "math"}], "candidate_limit": "drop"},
            "reward: candidate_limit: has no effect beside parts",
        ),
        ([{"model": "format", "format": {"tags": ["a b"]}}], "reward.parts.0.format.tags.0: "),
        ([{"model": "format", "format": {"tags": ["a", "a"]}}], "reward.parts.0.format: tags: a, a name one twice"),
    ],
)
def test_what_is_wrong_with_a_part_is_named(stated: object, message: str):
    from console.config.reward_settings import RewardDocument

    with pytest.raises(ConfigError, match=message):
        validate(RewardDocument, {"reward": stated}, source="my.yaml")


def test_a_string_still_names_one_model_and_a_dump_reads_back():
    assert RewardModelConfig.model_validate("numeric").model == "numeric"
    config = RewardModelConfig.model_validate([{"model": "math"}, {"model": "my:f", "weight": 0.5}])
    assert RewardModelConfig.model_validate_json(config.model_dump_json()) == config
    assert [part.component for part in config.parts] == ["math", "f"]
    assert config.needs_answer == "math"
    assert ScoringPool(model=composite(), config=config).holding_reason == ""
