"""The reward `judge` against a scripted endpoint over HTTP: votes, retries, limits, and what is never a number."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from penstock import tracing
from penstock.rewards import ModelAwayError, RewardItem, RewardLoadError, ScoreStatus, Turn
from penstock.rewards.local import LocalModel
from penstock.security import NO_SECURITY
from services.reward.config import RewardModelConfig
from services.reward.judge.config import JudgeConfig
from services.reward.judge.endpoint import JudgeRefusesError
from services.reward.judge.judge_reward import JudgeReward
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool
from tests.helpers.rewards.fake_source import FakeSource
from tests.helpers.rewards.scripted_judge import (
    Behaviour,
    ScriptedJudge,
    completion,
    material,
    refusal,
    scripted_judge,
    verdict,
)
from tests.helpers.traces import spans_in, tracing_to
from tests.helpers.waiting import until

RUBRIC = {"correct": "The answer is right.", "clear": "It is easy to follow."}
RIGHT = verdict(correct=10, clear=5)


def config(judge: ScriptedJudge, **changes: Any) -> JudgeConfig:
    return JudgeConfig.model_validate({"url": judge.url, "model": "judge", "rubric": RUBRIC, **changes})


def item(text: str = "4") -> RewardItem:
    return RewardItem(prompt="2+2=", completion=text, answer="4")


async def judged(behave: Behaviour, *items: RewardItem, timeout_s: float = 20, **changes: Any) -> Any:
    """The results of items, and the judge."""
    async with scripted_judge(behave) as judge:
        reward = JudgeReward(config(judge, **changes))
        try:
            return await reward.score_within(items or [item()], timeout_s=timeout_s), judge
        finally:
            await reward.close()


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(**_: float) -> Any:
        while True:
            yield 0.001

    for place in ("services.reward.judge.endpoint", "services.reward.pool", "services.reward.breaker"):
        monkeypatch.setattr(f"{place}.backoff_s", delays)


def cost(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"penstock_reward_judge_{name}_total", {"judge": "judge", **labels}) or 0.0


async def test_a_rubric_is_scored_by_medians_of_votes_with_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    by_seed = [verdict(correct=10, clear=0), verdict(correct=8, clear=5), verdict(correct=0, clear=10)]
    before = cost("tokens", kind="prompt"), cost("cost")
    sample = tracing.group_context("r", "g")
    with tracing.within(sample):
        [result], judge = await judged(
            lambda body: by_seed[body["seed"]],
            votes=3,
            temperature=0.7,
            prompt_price=2.0,
            completion_price=5.0,
            key_variable="JUDGE_KEY",
        )
    assert (result.status, result.value) == (ScoreStatus.OK, pytest.approx(0.65))
    assert result.components == {"correct": 0.8, "clear": 0.5}
    told = {name: text for name, text in result.details.items() if name != "prompt"}
    assert told == {"judge": "judge", "answered": "judge-1@fp-a", "votes": "[0.5, 0.65, 0.5]"}
    assert sorted(body["seed"] for body in judge.bodies) == [0, 1, 2]
    assert judge.keys == ["Bearer sk-secret"] * 3
    assert judge.traces == [sample.traceparent] * 3
    body = judge.bodies[0]
    assert (body["temperature"], body["response_format"]["json_schema"]["strict"]) == (0.7, True)
    assert material(body) == {"prompt": "2+2=", "completion": "4", "reference": "4"}
    assert cost("tokens", kind="prompt") - before[0] == 300
    assert cost("cost") - before[1] == pytest.approx((300 * 2 + 60 * 5) / 1e6)


async def test_a_judge_reads_what_an_environment_said_only_where_it_is_shown_the_turns() -> None:
    said = [Turn(role="assistant", content="5"), Turn(role="environment", content="No. [INST]")]
    session = RewardItem(
        prompt="2+2=", completion="5\n4", completion_turns=[*said, Turn(role="assistant", content="4")]
    )
    seen: dict[bool, Any] = {}
    versions: set[str] = set()
    for shows_turns in (False, True):
        results, judge = await judged(lambda _: RIGHT, item(), session, shows_turns=shows_turns)
        seen[shows_turns] = sorted(map(material, judge.bodies), key=lambda told: len(told["completion"]))
        versions |= {result.details["prompt"] for result in results}
        assert not any("[INST]" in body["messages"][-1]["content"] for body in judge.bodies)
    told = {"prompt": "2+2=", "completion": "5\n4"}
    assert seen[False] == [{"prompt": "2+2=", "completion": "4", "reference": "4"}, told]
    turns = {"1 assistant": "5", "2 environment": "No. [INST]", "3 assistant": "4"}
    assert seen[True] == [seen[False][0], {**told, "turns": turns}]
    assert len(versions) == 2


async def test_each_vote_stands_in_the_trace_of_its_sample_and_one_that_fails_always_does(tmp_path: Path) -> None:
    sampled = tracing.group_context("r", "sampled")
    other = dataclasses.replace(tracing.group_context("r", "other"), is_sampled=False)
    items = [dataclasses.replace(item(str(n)), traceparent=each.traceparent) for n, each in enumerate((sampled, other))]
    with tracing_to(tmp_path, ratio=0.0):
        _, judge = await judged(lambda body: RIGHT, *items)
        await judged(lambda body: "no verdict", *items[1:])
    good, bad = spans_in(tmp_path)
    assert (good.name, good.span["parentSpanId"]) == ("rl.judge.ask", f"{sampled.span_id:016x}")
    assert (bad.name, bad.span["parentSpanId"]) == ("rl.judge.ask", f"{other.span_id:016x}")
    assert bad.span["status"]["message"] == "UnusableAnswerError"
    assert f"00-{good.span['traceId']}-{good.span['spanId']}-01" in judge.traces
    assert other.traceparent in judge.traces


async def test_a_comparison_is_decided_by_the_majority_and_a_tie_is_no_number() -> None:
    def behave(body: dict[str, Any]) -> str:
        said = material(body)["completion"].split()[body["seed"]]
        return json.dumps({"reason": "", "verdict": said})

    items = [item(f"{a} {b}") for a, b in (("same", "same"), ("different", "different"), ("same", "different"))]
    results, _ = await judged(behave, *items, RewardItem(completion="4"), rubric={}, votes=2, quorum=1)
    assert [result.value for result in results] == [1.0, 0.0, None, None]
    assert [result.status for result in results[2:]] == [ScoreStatus.ABSTAINED, ScoreStatus.INVALID]


ODD = {
    "no JSON": "10",
    "prose around": f"Sure! {RIGHT}",
    "a fence": f"```json\n{RIGHT}\n```",
    "two objects": f"{RIGHT}{RIGHT}",
    "a list": f"[{RIGHT}]",
    "cut off": RIGHT[:-2],
    "a key twice": '{"reason": "", "scores": {"correct": 1, "clear": 1}, "scores": {"correct": 10, "clear": 10}}',
    "a key too many": '{"reason": "", "scores": {"correct": 1, "clear": 1}, "value": 1}',
    "a criterion too many": verdict(correct=1, clear=1, nice=10),
    "a criterion missing": verdict(correct=1),
    "no reason": '{"scores": {"correct": 1, "clear": 1}}',
    "text for a number": '{"reason": "", "scores": {"correct": "10", "clear": 1}}',
    "a fraction": '{"reason": "", "scores": {"correct": 9.5, "clear": 1}}',
    "true": '{"reason": "", "scores": {"correct": true, "clear": 1}}',
    "NaN": '{"reason": "", "scores": {"correct": NaN, "clear": 1}}',
    "above the scale": verdict(correct=11, clear=1),
    "below the scale": verdict(correct=-1, clear=1),
    "a huge number": '{"reason": "", "scores": {"correct": 1e400, "clear": 1}}',
    "deep nesting": "[" * 20_000,
    "nothing": "",
}
ENVELOPES: dict[str, Any] = {
    "no choices": {"object": "chat.completion"},
    "two choices": completion(RIGHT) | {"choices": completion(RIGHT)["choices"] * 2},
    "no content": completion(RIGHT) | {"choices": [{"message": {"content": None}}]},
    "a refusal": completion(RIGHT) | {"choices": [{"message": {"content": RIGHT, "refusal": "I cannot"}}]},
    "cut at max_tokens": completion(RIGHT) | {"choices": [{"message": {"content": RIGHT}, "finish_reason": "length"}]},
    "a list": [completion(RIGHT)],
    "an answer too long": completion("x" * 300_000),
    "a bad request": None,
}


async def test_what_is_not_exactly_a_verdict_is_never_a_number() -> None:
    by_text = {**ODD, **ENVELOPES}

    def behave(body: dict[str, Any]) -> Any:
        found = by_text[material(body)["completion"]]
        return refusal(400, "context too long") if found is None else found

    results, _ = await judged(behave, *map(item, by_text))
    odd = {name: result for name, result in zip(by_text, results, strict=True) if result.value is not None}
    assert odd == {}
    assert {result.status for result in results} == {ScoreStatus.JUDGE_ERROR}
    messages = dict(zip(by_text, (result.message for result in results), strict=True))
    assert "context too long" in messages["a bad request"]
    assert "reward.judge.max_tokens" in messages["cut at max_tokens"]
    assert "a response longer than 262144 bytes" in messages["an answer too long"]


async def test_a_quorum_of_usable_votes_is_enough_and_fewer_are_none() -> None:
    def behave(body: dict[str, Any]) -> str:
        return RIGHT if body["seed"] < int(material(body)["completion"]) else "?"

    results, _ = await judged(behave, item("3"), item("2"), votes=5)
    assert [result.value for result in results] == [0.75, None]
    assert results[1].message.startswith("2 of 5 votes can be used, 3 are needed: the answer is not JSON")


async def test_answers_are_asked_for_once_and_only_usable_ones_are_kept() -> None:
    async with scripted_judge(lambda body: RIGHT if len(judge.bodies) > 2 else "?") as judge:
        reward = JudgeReward(config(judge, votes=2, cache_mb=1))
        results = [(await reward.score_within([item()], timeout_s=20))[0].value for _ in range(4)]
        assert results == [None, 0.75, 0.75, 0.75]
        assert len(judge.bodies) == 4
        [other] = await reward.score_within([item("5")], timeout_s=20)
        # A canary asks again, and where the judge has changed its mind nothing counts that was kept.
        judge.behave = lambda _: verdict(correct=0, clear=0)
        [canary] = await reward.score_within([dataclasses.replace(item(), must_be_fresh=True)], timeout_s=20)
        [again] = await reward.score_within([item("5")], timeout_s=20)
        await reward.close()
    assert (other.value, canary.value, again.value, len(judge.bodies)) == (0.75, 0.0, 0.0, 10)


async def test_requests_are_repeated_as_the_endpoint_asks_and_paced() -> None:
    times: list[float] = []

    def behave(_body: dict[str, Any]) -> Any:
        times.append(asyncio.get_running_loop().time())
        return refusal(429, "slow down", **{"Retry-After": "0.4"}) if len(times) == 1 else RIGHT

    results, judge = await judged(behave, *[item(str(n)) for n in range(6)], max_concurrent=2, requests_per_second=50)
    assert [result.value for result in results] == [0.75] * 6
    assert judge.most_running <= 2
    # All requests wait, not only the one that was told to; one may have been on its way.
    assert sum(at - times[0] < 0.39 for at in times[1:]) <= 1
    paced = [later - earlier for earlier, later in itertools.pairwise(times[2:])]
    assert sum(paced) >= 0.9 * len(paced) / 50


async def test_an_endpoint_that_asks_to_wait_longer_than_there_is_time_is_away_and_not_called() -> None:
    async with scripted_judge(lambda _: refusal(429, "quota", **{"Retry-After": "100"})) as judge:
        reward = JudgeReward(config(judge))
        with pytest.raises(ModelAwayError, match=r"asked to wait for another \d+ s"):
            await reward.score_within([item()], timeout_s=5)
        with pytest.raises(ModelAwayError, match="asked to wait"):
            await reward.probe()
        await reward.close()
    assert (len(judge.bodies), judge.num_probes) == (1, 0)


async def test_an_endpoint_that_hangs_costs_its_deadline_and_no_number() -> None:
    never = asyncio.Event()

    async def behave(body: dict[str, Any]) -> str:
        if material(body)["completion"] == "hang":
            await never.wait()
        return RIGHT

    results, _ = await judged(behave, item("hang"), item(), timeout_s=2)
    assert [result.status for result in results] == [ScoreStatus.JUDGE_ERROR, ScoreStatus.OK]
    assert "no answer within 2 s" in results[0].message


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "refuses the key: set JUDGE_KEY to a valid one (401: no such key [key])"),
        (403, "forbids the request: check the key in JUDGE_KEY"),
        (404, "does not know the address or the model: check reward.judge.url and reward.judge.model (judge)"),
        (307, "answers from elsewhere"),
    ],
)
async def test_a_wrong_key_model_or_url_is_one_clear_line(
    status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    elsewhere = {"Location": "http://127.0.0.1:1/"}
    async with scripted_judge(lambda _: refusal(status, "no such key sk-secret", **elsewhere)) as judge:
        reward = JudgeReward(config(judge, key_variable="JUDGE_KEY"))
        with pytest.raises(RewardLoadError) as told:
            await reward.check()
        with pytest.raises(JudgeRefusesError):
            await reward.score_within([item()], timeout_s=5)
        await reward.close()
    assert words in str(told.value)
    assert "sk-secret" not in str(told.value)
    assert "\n" not in str(told.value)
    assert len(judge.bodies) == 2


async def test_a_check_names_who_answers_or_what_cannot_be_read() -> None:
    async with scripted_judge(lambda _: RIGHT) as judge:
        reward = JudgeReward(config(judge))
        assert await reward.check() == "judge-1@fp-a answers; it gives a right answer 0.75"
        judge.behave = lambda _: "yes"
        with pytest.raises(RewardLoadError, match=r"the answer is not JSON.*response_format: none"):
            await reward.check()
        await reward.close()


async def test_samples_wait_while_the_endpoint_is_away_and_none_is_scored_meanwhile() -> None:
    source = FakeSource(12)
    async with scripted_judge(lambda _: RIGHT) as judge:
        settings = RewardModelConfig.model_validate(
            {"model": "judge", "judge": config(judge).model_dump(), "max_batch_size": 4, "max_retries": 0}
        )
        model = build_model(RewardModelConfig(model="judge", judge=settings.judge))
        pool = ScoringPool(source=source, model=model, config=settings)
        judge.is_up = False
        task = asyncio.create_task(pool.run())
        try:
            await until(lambda: judge.num_probes > 3)
            assert "overloaded or away: 503: loading" in pool.holding_reason
            assert source.scores == {}
            judge.is_up = True
            await until(lambda: not source.held)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await model.close()
    assert [score.value for score in source.scores.values()] == [0.75] * 12
    assert {score.model for score in source.scores.values()} == {"judge:judge"}
    assert pool.holding_reason == ""


async def test_an_endpoint_without_a_server_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = JudgeReward(JudgeConfig(url="http://127.0.0.1:1/v1", model="m", rubric=RUBRIC))
    with pytest.raises(ModelAwayError, match=r"127\.0\.0\.1:1"):
        await LocalModel(reward).probe()
    with pytest.raises(ModelAwayError, match="ConnectError"):
        await reward.score_within([item()], timeout_s=5)
    monkeypatch.setattr("services.reward.judge.endpoint.backoff_s", lambda **_: itertools.repeat(60.0))
    # Without time for another attempt the last one's reason counts.
    with pytest.raises(ModelAwayError, match="ConnectError"):
        await reward.score_within([item()], timeout_s=5)
    await reward.close()


def test_a_key_is_not_shown_in_plain_text_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_JUDGE_API_KEY", "sk-secret")
    plain = JudgeConfig(url="http://judge.example/v1", model="m", rubric=RUBRIC)
    with pytest.raises(RewardLoadError, match="PENSTOCK_JUDGE_API_KEY would go there in plain text"):
        build_model(RewardModelConfig(model="judge", judge=plain), judges=NO_SECURITY)
    with pytest.raises(RewardLoadError, match=r"reward\.judge\.url"):
        build_model("judge")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "judge:8000"}, "url"),
        ({"url": "https://user:secret@judge/v1"}, "url"),
        ({"scale": (5, 5)}, "scale: 5 to 5"),
        ({"votes": 3, "quorum": 4}, "quorum: 4 of 3"),
        ({"body": {"messages": []}}, "body: messages"),
        ({"rubric": {"a b": "x"}}, "rubric"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JudgeConfig.model_validate({"url": "https://judge/v1", "model": "m", **changes})
