"""A built-in reward model is a line of a table: a toy one is built by name, scores, and is suggested for typos."""

from __future__ import annotations

import pytest

from penstock.rewards import RewardItem, RewardLoadError
from services.reward.models.build import BUILT_IN, InlineReward, build_model, check_name
from tests.helpers.brokers.scripted_scoring import scoring_item


def brevity(item: RewardItem) -> float:
    """A toy: the shorter, the better."""
    return 1.0 / (1 + len(item.completion))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "brevity", lambda _: InlineReward(brevity, name="brevity"))


async def test_it_is_built_by_its_name_and_scores():
    check_name("brevity")
    model = build_model("brevity")
    items = [scoring_item(index, completion=text) for index, text in enumerate(("", "abc"))]
    scores = await model.score(items, timeout_s=5)
    assert [score.value for score in scores] == [1.0, 0.25]
    assert {score.model for score in scores} == {"brevity"}


def test_a_mistyped_name_is_answered_with_the_nearest_one():
    with pytest.raises(RewardLoadError, match="did you mean 'brevity'"):
        check_name("brevit")
