"""Environments of other packages over the SDK's service: a real OpenEnv server, real games of TextArena."""

import asyncio
import os
import random
import signal
import socket
import subprocess
from contextlib import closing, contextmanager
from pathlib import Path

import aiohttp
import pytest

from penstock.environments import EnvironmentLoadError, load_environment
from penstock.errors import InvalidFieldError
from penstock.network.rpc import call
from penstock.v1 import environment_pb2, types_pb2
from tests.contract.environments.test_service import reset, served, step
from tests.helpers.imports import python_of

SERVER = Path(__file__).resolve().parents[2] / "helpers" / "imports" / "openenv_server.py"
FAILED = types_pb2.SCORE_STATUS_FAILED


@contextmanager
def openenv_server(port=0):
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    process = subprocess.Popen([python_of("openenv"), str(SERVER), str(port)])
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(timeout=20)


async def wait_until_it_answers(url):
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/health") as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


def wanted(seed, highest=100):
    return random.Random(seed).randint(1, highest)


@pytest.mark.timeout(150)
async def test_an_openenv_server_is_played_over_its_websocket():
    with openenv_server() as (url, process):
        await wait_until_it_answers(url)
        async with served(load_environment(f"openenv:{url}?timeout_s=20")) as (_, stub):
            opening = await reset(stub, seed=5)
            assert [(each.role, each.content) for each in opening.messages] == [("user", "between 1 and 100")]
            number = wanted(5)
            # A number as text, an action as JSON, and no action at all, which the model is told.
            low = await step(stub, 0, str(number - 1))
            assert ([each.content for each in low.messages], low.reward, low.done) == (["higher"], -0.1, False)
            bad = await step(stub, 1, "fifty")
            assert "This is no action" in bad.messages[0].content
            assert "number" in bad.messages[0].content
            assert not bad.HasField("reward")
            high = await step(stub, 2, f'{{"number": {number + 1}}}')
            assert high.messages[0].content == "lower"

            await reset(stub, "short", seed=5, metadata_json='{"reset": {"highest": 10}}')
            done = await step(stub, 0, str(wanted(5, 10)), "short")
            assert (done.done, done.reward) == (True, 1.0)
            # The server holds two sessions: a third one waits until one is over.
            third = asyncio.create_task(reset(stub, "third", seed=6))
            await call(stub.Close, environment_pb2.CloseRequest(session_id="short"), peer="environment")
            assert (await third).messages[0].content == "between 1 and 100"
            broken = await step(stub, 0, "666", "third")
            assert (broken.status, "not that one" in broken.message) == (FAILED, True)

            # A server that is started again has none of its sessions: they are played again.
            port = int(url.rpartition(":")[2])
            process.kill()
            process.wait(timeout=20)
            with openenv_server(port) as (url, _):
                await wait_until_it_answers(url)
                won = await step(stub, 3, str(number), timeout_s=30)
                assert (won.done, won.reward) == (True, 1.0), won


def test_names_that_lead_nowhere_say_what_to_write():
    for name, said in (
        ("openenv:", "openenv:http://HOST:PORT"),
        ("openenv:localhost:8000", "http://HOST:PORT"),
        ("openenv:http://user:secret@host", "without a password"),
        ("openenv:http://host?actoin=x", "actoin: unknown"),
        ("openenv:http://host?timeout_s=0", "timeout_s"),
        ("textarena:", "textarena:GAME"),
        ("textarena:Set-v0?python=/no/such/python", "no such file"),
    ):
        with pytest.raises(EnvironmentLoadError, match="environment") as raised:
            load_environment(name)
        assert said in str(raised.value)


@pytest.mark.timeout(150)
async def test_games_of_textarena_are_played_and_played_again_after_their_process_died():
    python = python_of("openenv")
    factory = load_environment(f"textarena:GuessTheNumber-v0?python={python}&min_number=1&max_number=8")
    async with served(factory) as (servicer, stub):
        opening = await reset(stub, "one", seed=3, timeout_s=120)
        assert "between 1 and 8" in opening.messages[0].content
        other = await reset(stub, "two", seed=3)
        assert other.messages == opening.messages
        texts = {}
        for turn in range(3):
            for name in ("one", "two"):
                answer = await step(stub, turn, f"[{turn + 1}]", name, timeout_s=60)
                texts.setdefault(turn, []).append((answer.messages and answer.messages[0].content, answer.done))
            assert texts[turn][0] == texts[turn][1]
            if texts[turn][0][1]:
                break
            os.kill(servicer._sessions["one"]._made._games._process.pid, signal.SIGKILL)
        else:
            turn += 1
            while not answer.done:
                answer = await step(stub, turn, f"[{turn + 1}]", "one", timeout_s=60)
                turn += 1
        assert answer.done
        assert 0 <= answer.reward <= 1
        with pytest.raises(InvalidFieldError, match="textarena:GuessTheNumber-v0"):
            await reset(stub, "bad", metadata_json='{"options": {"colour": "red"}}')
    async with served(load_environment(f"textarena:Chopsticks-v0?python={python}")) as (_, stub):
        with pytest.raises(InvalidFieldError, match="Chopsticks-v0"):
            await reset(stub, "two-player", timeout_s=120)
