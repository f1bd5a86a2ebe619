"""Before a run begins: whether the judge answers, and whether canaries are scored as known, in one line each."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from console.config.config import load_run_config
from console.run.grader_check import grader_problems
from console.serve.rewards import check_reward
from penstock.config import ConfigError
from services.reward.canaries.known import read_canaries
from services.reward.config import RewardConfig, RewardModelConfig
from services.reward.server import serve
from tests.helpers.ports import free_address
from tests.helpers.rewards.scripted_judge import ScriptedJudge, refusal, scripted_judge, verdict
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[3]
KEY = "PENSTOCK_JUDGE_API_KEY"


def settings(judge: ScriptedJudge, **changes: Any) -> dict[str, Any]:
    rubric = {"correct": "The answer is right."}
    return {"model": "judge", "judge": {"url": judge.url, "model": "j", "rubric": rubric}, **changes}


async def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = await asyncio.to_thread(check_reward, str(path))
    return status, capsys.readouterr().out.splitlines()


async def test_reward_check_of_a_configuration_says_whether_its_judge_answers_and_its_canaries_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, known = tmp_path / "my.yaml", tmp_path / "known.jsonl"
    known.write_text(json.dumps({"prompt": "2+2=", "completion": "4", "value": 0.9}) + "\n")
    async with scripted_judge(lambda _: verdict(correct=9)) as judge:
        document = settings(judge, canaries={"path": str(known)})
        file.write_text(json.dumps({"reward": document, "model": {"path": "m"}}))
        status, lines = await checked(file, capsys)
        assert status == 0
        assert lines == [
            "passed  loads: judge:j",
            "passed  answers: judge-1@fp-a answers; it gives a right answer 0.9",
            "passed  canaries: 1 are scored as known",
            f"{file} conforms",
        ]
        judge.behave = lambda _: verdict(correct=3)
        status, lines = await checked(file, capsys)
        assert status == 1
        assert lines[2] == "failed  canaries: line 1 got 0.3, known is 0.9 (tolerance 1e-06)"
        judge.behave = lambda _: refusal(404, "no model j")
        status, lines = await checked(file, capsys)
        assert status == 1
        assert "check reward.judge.url and reward.judge.model (j) (404: no model j)" in lines[1]
    status, lines = await checked(file, capsys)
    assert status == 1
    assert lines[1].startswith(f"failed  answers: judge {judge.url}: ConnectError")
    file.write_text("reward: exact_match\n")
    assert (await checked(file, capsys))[0] == 0
    file.write_text("reward: {model: judge}\n")
    assert "needs reward.judge.url and reward.judge.model" in (await checked(file, capsys))[1][0]
    file.write_text("reward: {model: judge, judge: {url: nowhere, model: m}}\n")
    with pytest.raises(ConfigError, match=r"reward\.judge\.url"):
        await checked(file, capsys)


def test_the_example_can_be_read() -> None:
    settings = load_run_config(ROOT / "examples" / "judge" / "run.yaml").reward
    assert settings.judge is not None
    assert settings.canaries is not None
    assert len(read_canaries(settings.canaries.model_copy(update={"path": ROOT / settings.canaries.path}))) == 3


async def test_a_run_and_a_worker_refuse_to_start_with_a_key_that_the_judge_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "sk-wrong")
    words = rf"refuses the key: set {KEY} to a valid one \(401: bad key\)"
    async with scripted_judge(lambda _: refusal(401, "bad key")) as judge:
        config = RewardModelConfig.model_validate(settings(judge, canaries={"path": str(tmp_path / "none")}))
        canaries, refused = await grader_problems(config, is_insecure=False)
        assert canaries.startswith("reward.canaries.path: ")
        assert refused.startswith(f"reward.judge: judge {judge.url} refuses the key")
        document = {"run_id": "r", "reward": settings(judge, trusts_generator_text=True)}
        with pytest.raises(ConfigError, match=words):
            await serve(RewardConfig.model_validate(document))
    assert await grader_problems(RewardModelConfig(), is_insecure=False) == []


async def test_a_worker_waits_for_a_judge_that_does_not_answer_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.judge.endpoint.backoff_s", lambda **_: itertools.repeat(0.001))
    async with scripted_judge(lambda _: verdict(correct=1)) as judge:
        judge.is_up = False
        document = {"run_id": "r", "listen": "127.0.0.1:0", "broker": free_address()}
        config = RewardConfig.model_validate(document | {"reward": settings(judge, trusts_generator_text=True)})
        with capture_logs() as logs:
            worker = asyncio.create_task(serve(config))
            try:
                await until(lambda: worker.done() or any("samples will wait for it" in log["event"] for log in logs))
                await until(lambda: worker.done() or any("reward listens" in log["event"] for log in logs))
                assert not worker.done()
            finally:
                worker.cancel()
                await asyncio.gather(worker, return_exceptions=True)
