import sys
import time

import math_verify
import pytest

from penstock.rewards import RewardItem, ScoreStatus
from services.reward.models import math_reward, math_worker
from services.reward.models.math_reward import MathReward


@pytest.fixture
async def model():
    reward = MathReward()
    yield reward
    await reward.close()


def item(completion, answer):
    return RewardItem(completion=completion, answer=answer)


async def test_equal_expressions_match_however_they_are_written(model):
    results = await model.score(
        [
            item("so it is $\\boxed{\\frac{1}{2}}$", "0.5"),
            item("#### 1/2", "\\frac{2}{4}"),
            item("Answer: x^2 + 2x + 1", "(x+1)^2"),
            item("#### 7", "8"),
            item("", "8"),
            item("no idea", "8"),
            item("#### 8", ""),
        ]
    )

    assert [result.value for result in results] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]
    assert results[-1].status is ScoreStatus.INVALID


async def test_an_expression_that_never_ends_is_killed_and_the_next_is_judged(model, monkeypatch):
    monkeypatch.setattr(math_reward, "ITEM_TIMEOUT_S", 0.5)
    set_worker(model, monkeypatch, "tests.helpers.rewards.hanging_worker")

    hanging = await model.score_within([item("#### 1", "1")], timeout_s=0.5)
    monkeypatch.undo()
    after = await model.score([item("#### 1", "1")] * 2)

    assert hanging[0].status is ScoreStatus.TIMEOUT
    assert [result.value for result in after] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "status"),
    [
        ("#### endless", "1", ScoreStatus.CANDIDATE_LIMIT),
        ("#### huge", "1", ScoreStatus.CANDIDATE_LIMIT),
        ("#### asleep", "1", ScoreStatus.TIMEOUT),
        ("#### 1", "endless", ScoreStatus.TIMEOUT),
    ],
)
async def test_what_uses_up_its_time_or_memory_exceeded_its_limits_unless_the_reference_does(
    model, monkeypatch, completion, answer, status
):
    set_worker(model, monkeypatch, "tests.helpers.rewards.busy_worker")
    assert [result.value for result in await model.score([item("#### 1", "1")] * 2)] == [1.0, 1.0]
    # The share of a busy machine's CPUs that a test gets in a second.
    monkeypatch.setattr(math_reward, "ITEM_TIMEOUT_S", 1.0)
    monkeypatch.setattr(math_reward, "CPU_SHARE", 0.03)
    (found,) = await model.score_within([item(completion, answer)], timeout_s=20.0 if answer == "1" else 3.0)
    assert (found.status, found.value) == (status, None)


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        ("endless to parse", "1", "limit"),
        ("endless to verify", "1", "limit"),
        ("1", "endless to parse", "invalid"),
        ("asleep", "asleep", "value"),
    ],
)
def test_only_the_time_of_a_cpu_is_limited_and_what_used_it_up_is_no_wrong_answer(
    monkeypatch, completion, answer, verdict
):
    def parse(text, *, parsing_timeout):
        assert parsing_timeout is None
        spin("endless to parse" in text)
        time.sleep(0.6 if text == "asleep" else 0)
        return [text]

    def verify(reference, given, *, timeout_seconds):
        assert timeout_seconds is None
        spin("endless to verify" in given[0])
        return reference == given

    def spin(is_endless):
        try:
            while is_endless:
                pass
        except Exception:  # as the library does
            return

    monkeypatch.setattr(math_verify, "parse", parse)
    monkeypatch.setattr(math_verify, "verify", verify)
    # Other threads of the tests' process count, too.
    monkeypatch.setattr(math_worker, "MAX_CPU_S", 0.3)
    found = math_worker.judge(completion=completion, answer=answer)
    assert list(found) == [verdict]
    assert "value" not in found or found["value"] == 1


def set_worker(model, monkeypatch, module):
    """Start another module in the place of its child processes."""
    for child in model._workers._children:
        monkeypatch.setattr(child, "_command", (sys.executable, "-m", module))


async def test_a_worker_that_dies_fails_its_sample_only(model, monkeypatch):
    set_worker(model, monkeypatch, "tests.helpers.no_such_module")
    dead = await model.score([item("#### 1", "1")])
    monkeypatch.undo()
    after = await model.score([item("#### 1", "1")])

    assert dead[0].status is ScoreStatus.FAILED
    assert after[0].value == 1.0
