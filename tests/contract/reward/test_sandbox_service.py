"""Programs run by a sandbox service elsewhere: verdicts as here, and no error of it ever a number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import tracing
from penstock.errors import InvalidFieldError, NotOfferedError
from penstock.network.rpc import call, open_channel
from penstock.rewards import ModelAwayError, RewardItem, RewardLoadError, RewardResult, ScoreStatus
from penstock.v1 import sandbox_pb2, sandbox_pb2_grpc
from services.reward.code.cell import Verdict
from services.reward.code.code_reward import CodeReward
from services.reward.code.config import CodeConfig, ProgramsConfig
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.reasoning_gym.reward import ReasoningGymReward
from services.reward.reasoning_gym.scorers import Answer
from tests.contract.reward.test_code import ADD, ASSERTIONS, CALLS, CHECK, PASSED, SCRIPT, STREAMS, WRONG
from tests.helpers.ports import free_address
from tests.helpers.rewards.sandbox_service import ScriptedCells, ScriptedScorers, sandbox_service
from tests.helpers.traces import spans_in, tracing_to


def item(row: dict[str, Any], body: str = ADD) -> RewardItem:
    return RewardItem(completion=f"Well:\n```python\n{body}\n```", metadata=row)


@asynccontextmanager
async def reward_at(target: str, **settings: Any) -> AsyncIterator[CodeReward]:
    reward = CodeReward(CodeConfig(sandbox="remote", sandbox_service=target, **settings))
    try:
        yield reward
    finally:
        await reward.close()


async def scored_by(
    answer: Verdict | Exception | None, *, timeout_s: float = 20, programs: ProgramsConfig | None = None
) -> RewardResult:
    cells = ScriptedCells(answer)
    async with sandbox_service(programs or ProgramsConfig(), cells) as target, reward_at(target) as reward:
        [result] = await reward.score_within([item(CALLS)], timeout_s=timeout_s)
        if answer is None:
            await asyncio.wait_for(cells.is_cancelled.wait(), 10)
    return result


async def test_verdicts_are_those_of_a_sandbox_here() -> None:
    try:
        kind, _ = find_sandbox("auto")
    except SandboxError as error:
        pytest.skip(str(error))
    cases = [(SCRIPT, STREAMS), (ADD, CALLS), (ADD, ASSERTIONS), (ADD, CHECK), ("print(5)", STREAMS)]
    async with sandbox_service(ProgramsConfig()) as target, reward_at(target, credit="share") as reward:
        assert await reward.check() == f"programs run at {target}, 2 at once, in {kind}"
        results = await reward.score([item(row, body) for body, row in cases])
        endless = [item(CALLS, "while True: pass"), item({"test_list": ["assert add(print, 1)"]})]
        limited, invalid = await reward.score(endless)
    assert [(result.status, result.value) for result in results] == [*[PASSED] * 4, (ScoreStatus.OK, 0.5)]
    assert ((limited.status, limited.value), limited.components["exceeded_limit"]) == (WRONG, 1.0)
    assert invalid.status is ScoreStatus.INVALID


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Verdict(error="no memory left"), "no memory left"),
        (SandboxError("it ended"), "it ended"),
        (RuntimeError("a defect"), "sandbox service"),
        (Verdict(), "0 of 0 tests passed, and 2 were sent"),
        (Verdict(num_tests=2, num_passed=3), "3 of 2 tests passed"),
        (Verdict(num_tests=1, num_passed=1), "1 of 1 tests passed, and 2 were sent"),
    ],
)
async def test_no_error_of_the_service_is_a_number(answer: Verdict | Exception, words: str) -> None:
    result = await scored_by(answer)
    assert (result.status, result.value) == (ScoreStatus.SANDBOX_ERROR, None)
    assert words in result.message


async def test_what_a_program_did_stands_in_the_trace_of_its_sample(tmp_path: Path) -> None:
    sampled = tracing.group_context("r", "sampled")
    other = replace(tracing.group_context("r", "other"), is_sampled=False)
    cells = ScriptedCells(Verdict(num_tests=2, num_passed=2))
    with tracing_to(tmp_path, ratio=0.0):
        async with sandbox_service(ProgramsConfig(), cells) as target, reward_at(target) as reward:
            # One after the other: the service's cells say what each of them did.
            for context, error in ((sampled, ""), (other, ""), (other, "no memory left")):
                cells.answer = Verdict(num_tests=2, num_passed=2, error=error)
                await reward.score([replace(item(CALLS), traceparent=context.traceparent)])
    inner, outer, failed_inner, failed_outer = spans_in(tmp_path)
    assert (outer.name, outer.span["parentSpanId"]) == ("rl.program.run", f"{sampled.span_id:016x}")
    assert (inner.name, inner.span["parentSpanId"]) == ("rl.sandbox.run", outer.span["spanId"])
    for span in (failed_inner, failed_outer):
        assert span.span["traceId"] == f"{other.trace_id:032x}"
        assert span.span["status"]["message"] == "no memory left"


async def test_a_service_that_is_late_times_out_and_ends_the_program() -> None:
    result = await scored_by(None, timeout_s=0.3)
    assert (result.status, result.value) == (ScoreStatus.TIMEOUT, None)


async def test_while_the_service_is_away_samples_wait() -> None:
    async with reward_at(free_address()) as reward:
        for asking in (reward.check(), reward.probe(), reward.score_within([item(CALLS)], timeout_s=20)):
            with pytest.raises(ModelAwayError, match="sandbox service"):
                await asking


async def test_a_worker_that_wants_more_than_the_service_allows_does_not_start() -> None:
    cells = ScriptedCells(Verdict(num_tests=2))
    async with sandbox_service(ProgramsConfig(memory_mb=256), cells) as target, reward_at(target) as reward:
        with pytest.raises(RewardLoadError, match=r"memory_bytes: 5.36871e\+08 is asked for, .* allow more there"):
            await reward.check()
        [result] = await reward.score_within([item(CALLS)], timeout_s=20)
    assert (result.status, cells.jobs) == (ScoreStatus.SANDBOX_ERROR, [])


async def test_the_service_runs_its_own_command_and_refuses_what_is_malformed() -> None:
    cells = ScriptedCells(Verdict(num_tests=2, num_passed=2))
    programs = ProgramsConfig(command=["/usr/bin/python3", "-I"])
    async with sandbox_service(programs, cells) as target, reward_at(target, command=["/bin/sh"]) as reward:
        assert (await reward.score([item(CALLS)]))[0].value == 1.0
        assert cells.jobs[0].command == ["/usr/bin/python3", "-I"]
        async with open_channel(target) as channel:
            stub: Any = sandbox_pb2_grpc.SandboxServiceStub(channel)
            for field, request in malformed():
                with pytest.raises(InvalidFieldError, match=field):
                    await call(stub.RunProgram, request, peer="sandbox")
    assert len(cells.jobs) == 1


ROW = {"name": "chain_sum", "seed": 0, "level": None, "config": {}, "index": 0}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"value": 0.5}, ScoreStatus.OK, ""),
        ({"limit": "its time"}, ScoreStatus.CANDIDATE_LIMIT, "its time"),
        ({"invalid": "another row"}, ScoreStatus.INVALID, "another row"),
        ({"failed": "it raised"}, ScoreStatus.FAILED, "it raised"),
        ({"error": "no memory left"}, ScoreStatus.SANDBOX_ERROR, "no memory left"),
        ({}, ScoreStatus.SANDBOX_ERROR, "gave no answer"),
        (RuntimeError("a defect"), ScoreStatus.SANDBOX_ERROR, "sandbox service"),
        (TimeoutError(), ScoreStatus.TIMEOUT, "no score in time"),
    ],
)
async def test_answers_to_reasoning_gym_are_scored_there_and_no_error_is_a_number(
    answer: dict[str, Any] | Exception, status: ScoreStatus, words: str
) -> None:
    scorers = ScriptedScorers(answer)
    cells = ScriptedCells(Verdict())
    asked = RewardItem(completion="#### 4", answer="4", metadata={"reasoning_gym": ROW})
    async with sandbox_service(ProgramsConfig(), cells, scorers) as target:
        reward = ReasoningGymReward(CodeConfig(sandbox="remote", sandbox_service=target))
        assert await reward.check() == f"answers are scored at {target}, by reasoning_gym 0.0"
        [result, unknown] = await reward.score_within([asked, RewardItem(completion="4")], timeout_s=20)
        await reward.close()
    assert (result.status, result.value) == (status, 0.5 if status is ScoreStatus.OK else None)
    assert words in result.message
    assert unknown.status is ScoreStatus.INVALID
    assert scorers.asked == [Answer(row=ROW, expected="4", given="4")]


async def test_a_service_without_the_package_is_refused_at_the_start_and_samples_wait_for_it_later() -> None:
    asked = RewardItem(completion="4", answer="4", metadata={"reasoning_gym": ROW})
    async with sandbox_service(ProgramsConfig(), ScriptedCells(Verdict())) as target:
        reward = ReasoningGymReward(CodeConfig(sandbox="remote", sandbox_service=target))
        with pytest.raises(RewardLoadError, match="there is no package reasoning-gym at "):
            await reward.check()
        with pytest.raises(ModelAwayError, match="ScoreAnswer: there is no package reasoning-gym here"):
            await reward.score([asked])
        async with open_channel(target) as channel:
            stub: Any = sandbox_pb2_grpc.SandboxServiceStub(channel)
            with pytest.raises(NotOfferedError):
                await call(stub.ScoreAnswer, sandbox_pb2.ScoreAnswerRequest(), peer="sandbox")
        await reward.close()


async def test_answers_that_are_malformed_are_refused() -> None:
    scorers = ScriptedScorers({"value": 1.0})
    async with (
        sandbox_service(ProgramsConfig(), ScriptedCells(Verdict()), scorers) as target,
        open_channel(target) as channel,
    ):
        stub: Any = sandbox_pb2_grpc.SandboxServiceStub(channel)
        for fields in (
            {"row_json": ""},
            {"row_json": "[" * 60_000},
            {"row_json": json.dumps({**ROW, "index": -1})},
            {"given": "x" * 65_537},
            {"expected": "x" * 65_537},
        ):
            request = sandbox_pb2.ScoreAnswerRequest(**{"row_json": json.dumps(ROW), **fields})
            with pytest.raises(InvalidFieldError, match=next(iter(fields))):
                await call(stub.ScoreAnswer, request, peer="sandbox")
    assert scorers.asked == []


def malformed() -> list[tuple[str, sandbox_pb2.RunProgramRequest]]:
    """Requests with what is wrong with each."""
    limits = sandbox_pb2.ProgramLimits(cpu_s=1, wall_s=1, memory_bytes=10**8, max_processes=1, output_bytes=100)

    def request(**fields: Any) -> sandbox_pb2.RunProgramRequest:
        streams: dict[str, Any] = {"tests_kind": 1, "tests_json": '{"inputs": [""], "outputs": [""]}', "limits": limits}
        return sandbox_pb2.RunProgramRequest(**streams | fields)

    endless = sandbox_pb2.ProgramLimits()
    endless.CopyFrom(limits)
    endless.wall_s = float("nan")
    return [
        ("program", request(program="x" * 1024 * 1024 + "x")),
        ("tests_json", request(tests_json=" " * 1024 * 1024 + "{}")),
        ("limits", request(limits=endless)),
        ("limits", request(limits=sandbox_pb2.ProgramLimits())),
        ("tests_kind", request(tests_kind=0)),
        ("tests_kind", request(tests_kind=9)),
        *(
            ("tests_json", request(tests_kind=kind, tests_json=text))
            for kind, text in [
                (1, ""),
                (1, "[]"),
                (1, '{"inputs": [], "outputs": []}'),
                (1, '{"inputs": ["a", "b"], "outputs": ["a"]}'),
                (1, '{"inputs": [1], "outputs": ["a"]}'),
                (2, '{"function": "f(); g", "arguments": [[1]], "results": [1]}'),
                (3, '{"setup": "", "tests": "abc"}'),
                (1, "[" * 100_000),
            ]
        ),
    ]
