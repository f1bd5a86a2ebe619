"""`check_server` against servers that conform and servers that do not, and against the examples."""

import asyncio
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.errors import InvalidFieldError
from penstock.network.rpc import call, open_channel, service_of, wait_until_serving
from penstock.rewards.check import SERVICE_NAME, check_server
from penstock.rewards.score_messages import GRADER_ERRORS
from penstock.rewards.serving import reward_service
from penstock.rewards.verdicts import CheckStatus, conforms
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from tests.helpers.brokers.scripted_scoring import scoring_item
from tests.helpers.ports import free_address
from tests.helpers.serving import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
OK = types_pb2.SCORE_STATUS_OK


class Foreign(reward_pb2_grpc.RewardServiceServicer):
    """A server somebody wrote: `answer(items)` gives the values."""

    def __init__(self, answer, *, accepts_empty=False):
        self.answer = answer
        self.accepts_empty = accepts_empty

    async def Score(self, request, context):
        if not request.items and not self.accepts_empty:
            raise InvalidFieldError("items: none given")
        values = self.answer(list(request.items))
        return reward_pb2.ScoreResponse(scores=[types_pb2.Score(status=OK, value=value) for value in values])


class Verdicts(reward_pb2_grpc.RewardServiceServicer):
    """A server that answers each item with the status, or Score, that `verdict(item)` says."""

    def __init__(self, verdict):
        self.verdict = verdict

    async def Score(self, request, context):
        if not request.items:
            raise InvalidFieldError("items: none given")
        return reward_pb2.ScoreResponse(scores=[self._score(self.verdict(item), item) for item in request.items])

    def _score(self, verdict, item):
        if isinstance(verdict, types_pb2.Score):
            return verdict
        if verdict == OK:
            return types_pb2.Score(status=OK, value=float(len(item.completion_text)))
        return types_pb2.Score(status=verdict, message="said so")


def foreign(answer, **options):
    return service_of(Foreign(answer, **options))


def lengths(items):
    return [float(len(item.completion_text)) for item in items]


async def checked(service):
    async with serving(service) as (_, target):
        return {result.name: result for result in await check_server(target, timeout_s=10)}


async def failures(service):
    results = await checked(service)
    return {name for name, result in results.items() if result.status is CheckStatus.FAILED}


COMPOSITE = {
    "parts": [
        {"model": "exact_match"},
        {"model": "format", "weight": 0.1},
        {"model": "length", "weight": 0.5, "length": {"target_tokens": 8}},
        {"model": "ngram_repetition", "ngram_repetition": {"unit": "tokens"}},
    ]
}


@pytest.mark.parametrize("stated", ["exact_match", "numeric", "math", COMPOSITE], ids=lambda each: str(each)[:11])
async def test_built_in_models_conform(stated):
    model = build_model(RewardModelConfig.model_validate(stated))
    try:
        results = await checked(reward_service(model))
    finally:
        await model.close()
    assert conforms(results.values())
    assert results["verdicts"].detail == "OK 8"
    if stated is COMPOSITE:
        assert "adds up 1 exact_match, 0.1 format, 0.5 length, 1 ngram_repetition" in results["description"].detail


async def test_each_verdict_is_accepted_without_a_value_and_shown():
    statuses = [status for _, status in types_pb2.ScoreStatus.items() if status > OK]
    for status in statuses:
        results = await checked(service_of(Verdicts(lambda _, status=status: status)))
        name = types_pb2.ScoreStatus.Name(status).removeprefix("SCORE_STATUS_")
        assert f"{name} 8 (said so)" in results["verdicts"].detail
        assert (results["verdicts"].status is CheckStatus.FAILED) == (status in GRADER_ERRORS)
        others = [result for result in results.values() if result.name != "verdicts"]
        assert conforms(others)


async def test_a_grader_that_fails_now_and_then_is_noted_and_its_order_checked_without_those():
    turns = itertools.cycle([OK, OK, types_pb2.SCORE_STATUS_JUDGE_ERROR])
    results = await checked(service_of(Verdicts(lambda _: next(turns))))
    assert conforms(results.values())
    assert results["verdicts"].status is CheckStatus.NOTED
    assert "a run tries them again" in results["verdicts"].detail


async def test_a_value_beside_an_error_is_a_breach():
    limit = types_pb2.Score(status=types_pb2.SCORE_STATUS_CANDIDATE_LIMIT, value=0.0)
    results = await checked(service_of(Verdicts(lambda _: limit)))
    assert "value must be set if and only if status is OK" in results["answers"].detail


async def test_a_minimal_server_conforms():
    async with serving(foreign(lengths)) as (_, target):
        results = await check_server(target)

    assert conforms(results)
    assert {result.name for result in results if result.status is CheckStatus.NOTED} == {"description"}


counter = itertools.count()


@pytest.mark.parametrize(
    ("answer", "options", "failed"),
    [
        (lengths, {"accepts_empty": True}, "empty batch refused"),
        (lambda items: lengths(items)[::-1], {}, "one score per item, in order"),
        (lambda items: lengths(items)[:-1] if len(items) > 1 else lengths(items), {}, "one score per item, in order"),
        (lambda items: [float(next(counter)) for _ in items], {}, "repeatable"),
        (lambda items: [1 / len(item.completion_text) for item in items], {}, "odd samples"),
        (
            lambda items: [math.inf if len(item.completion_text) > 9999 else 1.0 for item in items],
            {},
            "long completion",
        ),
    ],
)
async def test_each_breach_is_named(answer, options, failed):
    assert failed in await failures(foreign(answer, **options))


async def test_a_closed_port_is_one_clear_failure():
    results = await check_server(free_address(), timeout_s=5)

    assert len(results) == 1
    assert not conforms(results)
    assert "no server answers at 127.0.0.1" in results[0].detail


@asynccontextmanager
async def process(*command, cwd, **environment):
    target = free_address()
    child = await asyncio.create_subprocess_exec(*command, target, cwd=cwd, env={**os.environ, **environment})
    try:
        assert await wait_until_serving(target, service=SERVICE_NAME, timeout_s=30)
        yield target
    finally:
        child.terminate()
        async with asyncio.timeout(15):
            assert await child.wait() == 0


async def scored_by(target):
    requests = [scoring_item(0), scoring_item(1, completion="#### 5"), scoring_item(2, completion="4" * 4000)]
    said = [types_pb2.ChatMessage(role=role, content="4") for role in ("assistant", "environment", "assistant")]
    requests[2].completion_turns.extend(said)
    async with open_channel(target) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        return (await call(stub.Score, reward_pb2.ScoreRequest(items=requests), peer="example")).scores


EXPECTED = pytest.approx([0.997, -0.003, -0.2])
TURNS = [1, 1, 2]


async def test_the_python_example_conforms_and_scores():
    async with process(sys.executable, "brevity.py", cwd=ROOT / "examples/reward_python") as target:
        assert conforms(await check_server(target))
        scores = await scored_by(target)
        assert [score.value for score in scores] == EXPECTED
        assert [score.components["turns"] for score in scores] == TURNS


@pytest.fixture(scope="session")
def node_example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node") / "reward_node"
    shutil.copytree(ROOT / "examples/reward_node", folder)
    if not (folder / "node_modules").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, and the example's node_modules are absent")
        installed = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert installed.returncode == 0, installed.stderr
    return folder


@pytest.mark.node
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
async def test_the_node_example_conforms_and_scores_like_the_python_one(node_example):
    async with process("node", "server.js", cwd=node_example, PENSTOCK_PROTOS=str(ROOT / "protos")) as target:
        assert conforms(await check_server(target))
        scores = await scored_by(target)
        assert [score.value for score in scores] == EXPECTED
        assert [score.components["turns"] for score in scores] == TURNS


def test_the_node_lock_file_names_no_registry():
    packages = json.loads((ROOT / "examples/reward_node/package-lock.json").read_text())["packages"]

    assert len(packages) > 10
    assert not any("resolved" in package for package in packages.values())
    assert all("integrity" in package for path, package in packages.items() if path)
