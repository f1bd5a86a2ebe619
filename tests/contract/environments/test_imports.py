"""Environments of other packages over the SDK's service: a real OpenEnv server, real games of TextArena."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from penstock.environments import EnvironmentLoadError, load_environment
from penstock.environments.imports import openenv_sessions
from penstock.errors import InvalidFieldError, QueueFullError
from penstock.network.rpc import call
from penstock.v1 import environment_pb2, types_pb2
from tests.contract.environments.test_service import reset, served, step
from tests.helpers.imports import python_of
from tests.helpers.waiting import until

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


@asynccontextmanager
async def serving_http(app):
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


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


async def test_a_full_openenv_server_that_hangs_up_before_it_is_asked_is_waited_for():
    num_asked = 0

    async def play(request):
        nonlocal num_asked
        num_asked += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if num_asked < 3:
            full = {"message": "Server at capacity: 2/2", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": full})
            return socket
        async for _ in socket:
            answer = {"observation": {"text": "begin"}, "reward": None, "done": False}
            await socket.send_json({"type": "observation", "data": answer})
        return socket

    app = web.Application()
    app.router.add_get("/ws", play)
    async with serving_http(app) as url, served(load_environment(f"openenv:{url}?timeout_s=20")) as (_, stub):
        assert (await reset(stub)).messages[0].content == "begin"
    assert num_asked == 3


async def test_what_an_openenv_server_says_twice_is_never_the_reward_of_another_turn():
    async def play(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        number = 0
        async for _ in socket:
            answer = {"observation": {"text": f"turn {number}"}, "reward": float(number), "done": number == 2}
            for _ in range(2 if "twice" in request.path and number == 1 else 1):
                await socket.send_json({"type": "observation", "data": answer})
            number += 1
        return socket

    app = web.Application()
    app.router.add_get("/{how}/ws", play)
    async with serving_http(app) as url:
        async with served(load_environment(f"openenv:{url}/once?timeout_s=20")) as (_, stub):
            await reset(stub)
            assert [(await step(stub, turn, "x")).reward for turn in range(2)] == [1.0, 2.0]
        async with served(load_environment(f"openenv:{url}/twice?timeout_s=20")) as (_, stub):
            await reset(stub)
            assert (await step(stub, 0, "x")).reward == 1.0
            second = await step(stub, 1, "x")
            assert (second.status, second.HasField("reward")) == (types_pb2.SCORE_STATUS_SANDBOX_ERROR, False)
            assert "spoke unasked" in second.message


async def test_a_full_openenv_server_is_waited_for_beyond_one_call(monkeypatch):
    monkeypatch.setattr(openenv_sessions, "CAPACITY_WAIT_S", 0.3)
    playing, full_s = set(), []

    async def play(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if playing:
            full_s.append(asyncio.get_running_loop().time())
            said = {"message": "1 of 1 sessions", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}
            await socket.send_json({"type": "error", "data": said})
            await socket.close()
            return socket
        playing.add(socket)
        async for message in socket:
            if json.loads(message.data)["type"] == "close":
                break
            await socket.send_json({"type": "observation", "data": {"observation": {"text": "hello"}}})
        playing.discard(socket)
        return socket

    def num_full():
        return REGISTRY.get_sample_value("penstock_environment_full_total") or 0

    app = web.Application()
    app.router.add_get("/ws", play)
    async with serving_http(app) as url, served(load_environment(f"openenv:{url}?timeout_s=20")) as (servicer, stub):
        before = num_full()
        await reset(stub, "first")
        # No session is open for one that has to wait long: its caller asks again.
        with pytest.raises(QueueFullError, match="1 of 1 sessions"):
            await reset(stub, "second")
        assert servicer.num_sessions == 1
        assert num_full() - before == len(full_s) >= 2
        monkeypatch.setattr(openenv_sessions, "CAPACITY_WAIT_S", 60.0)
        second = asyncio.create_task(reset(stub, "second", timeout_s=60.0))
        num_before = len(full_s)
        await until(lambda: len(full_s) > num_before)
        await call(stub.Close, environment_pb2.CloseRequest(session_id="first"), peer="environment")
        assert (await second).messages[0].content == "hello"


def test_names_that_lead_nowhere_say_what_to_write():
    for name, said in (
        ("openenv:", "openenv:http://HOST:PORT"),
        ("openenv:localhost:8000", "http://HOST:PORT"),
        ("openenv:http://user:secret@host", "without a password"),
        ("openenv:http://host?actoin=x", "actoin: unknown"),
        ("openenv:http://host?timeout_s=0", "timeout_s"),
        ("nemo_gym:http://host?action=x", "action: unknown"),
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
            os.kill(servicer._sessions["one"]._made._games._child._process.pid, signal.SIGKILL)
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


@asynccontextmanager
async def nemo_gym_server(exchanges):
    """Answers as resource servers of NeMo Gym do; the package itself is not needed for its wire format."""

    async def answer(request):
        body, name = await request.json(), request.match_info["name"]
        exchanges.append((name, request.cookies.get("session"), body))
        if name == "seed_session":
            response = web.json_response({})
            response.set_cookie("session", f"s{len(exchanges)}")
            return response
        if name == "add":
            return web.json_response({"sum": body["a"] + body["b"]})
        said = body["response"]["output"][-1]
        if body["expected"] == "broken":
            return web.json_response({"reward": "high"})
        reward = float(said["type"] == "message" and said["content"][0]["text"] == str(body["expected"]))
        return web.json_response({**body, "reward": reward, "num_items": len(body["response"]["output"])})

    app = web.Application()
    app.router.add_post("/{name}", answer)
    async with serving_http(app) as url:
        yield url


def nemo_row(expected):
    tools = [{"type": "function", "name": "add"}, {"type": "function", "name": "verify"}]
    return json.dumps({"responses_create_params": {"input": "2+2?", "tools": tools}, "expected": expected})


async def test_a_server_of_nemo_gym_gets_its_row_back_with_all_that_the_model_did():
    exchanges = []
    add = environment_pb2.ToolCall(name="add", arguments_json='{"a": 2, "b": 2}')
    cheat = environment_pb2.ToolCall(name="verify", arguments_json="{}")
    async with nemo_gym_server(exchanges) as url, served(load_environment(f"nemo_gym:{url}")) as (_, stub):
        opening = await reset(stub, metadata_json=nemo_row(4))
        assert not opening.messages
        request = environment_pb2.StepRequest(session_id="s", turn=0, text="I add.", tool_calls=[add, cheat])
        called = await call(stub.Step, request, peer="environment")
        assert [(each.role, each.content) for each in called.messages] == [
            ("tool", '{"sum": 4}'),
            ("tool", "there is no tool 'verify'; there are add"),
        ]
        done = await step(stub, 1, "4")
        assert (done.done, done.reward, done.components["num_items"]) == (True, 1.0, 6.0)
        assert [name for name, _, _ in exchanges] == ["seed_session", "add", "verify"]
        assert [cookie for _, cookie, _ in exchanges] == [None, "s1", "s1"]
        kinds = [item["type"] for item in exchanges[-1][2]["response"]["output"]]
        assert kinds == ["message", "function_call", "function_call", *["function_call_output"] * 2, "message"]

        await reset(stub, "bad", metadata_json=nemo_row("broken"))
        broken = await step(stub, 0, "4", "bad")
        assert broken.status == types_pb2.SCORE_STATUS_SANDBOX_ERROR
        assert "reward: 'high'" in broken.message
        with pytest.raises(InvalidFieldError, match="responses_create_params"):
            await reset(stub, "none", metadata_json="{}")
