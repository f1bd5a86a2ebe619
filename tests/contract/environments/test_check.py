"""`penstock env check`: the examples conform, and servers that break the contract are told how."""

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from penstock.environments import Action, Environment, Message, Outcome, Task
from penstock.environments.check import check_server
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.network.rpc import wait_until_serving
from penstock.rewards.verdicts import CheckStatus, conforms
from penstock.v1 import environment_pb2
from tests.helpers.ports import free_address
from tests.helpers.serving import serving

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "examples"
SAY = ("50", "40", "42")


def failures(results):
    return {result.name for result in results if result.status is CheckStatus.FAILED}


class Counting(Environment):
    """Its answers follow from nothing that a task or a turn says."""

    numbers = count()

    def reset(self, task: Task) -> None:
        return None

    def step(self, action: Action) -> Outcome:
        return Outcome(messages=[Message(role="user", content=str(next(self.numbers)))], is_done=action.turn == 1)


class Forgetful(EnvironmentServicer):
    """Takes a repeated turn as one more."""

    async def Step(self, request, context):
        self.number = getattr(self, "number", 0) + 1
        return environment_pb2.StepResponse(reward=self.number, done=True)


async def test_what_does_not_conform_is_named():
    async with serving(environment_service(EnvironmentServicer(Counting))) as (_, target):
        assert failures(await check_server(target, row={})) == {"replay", "sessions side by side", "deadline"}
    async with serving(environment_service(Forgetful(Counting))) as (_, target):
        found = failures(await check_server(target, row={}))
    assert found >= {"repeated turns", "another text for a taken turn", "turns out of order", "close"}
    [only] = await check_server("127.0.0.1:9", row={}, timeout_s=5)
    assert (only.status, "no server answers" in only.detail) == (CheckStatus.FAILED, True)


@contextmanager
def running(command, *, cwd, env=None):
    address = free_address()
    process = subprocess.Popen([*command, address], cwd=cwd, env={**os.environ, **(env or {})})
    try:
        yield address
    finally:
        process.terminate()
        process.wait(timeout=20)


async def assert_conforms(command, *, cwd, env=None):
    with running(command, cwd=cwd, env=env) as address:
        assert await wait_until_serving(address, timeout_s=60)
        results = await check_server(address, row={"answer": "42"}, say=SAY)
    assert conforms(results), [result for result in results if result.status is CheckStatus.FAILED]
    [turns] = [result.detail for result in results if result.name == "turns"]
    assert turns == "done after 3 turns, rewards 0.1, 0.1, 1"


async def test_the_python_example_conforms():
    await assert_conforms([sys.executable, "guess.py"], cwd=EXAMPLES / "environment_python")


@pytest.mark.node
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js and npm")
async def test_the_node_example_conforms(tmp_path):
    example = tmp_path / "environment_node"
    shutil.copytree(EXAMPLES / "environment_node", example, ignore=shutil.ignore_patterns("node_modules"))
    await asyncio.to_thread(subprocess.run, ["npm", "ci", "--silent"], cwd=example, check=True, timeout=180)
    await assert_conforms(["node", "server.js"], cwd=example, env={"PENSTOCK_PROTOS": str(EXAMPLES.parent / "protos")})
