"""Tools of a real MCP server, written with its SDK, over stdio and HTTP, through the SDK's service."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.environments import EnvironmentLoadError, load_environment
from penstock.network.rpc import call
from penstock.v1 import environment_pb2, types_pb2
from tests.contract.environments.test_service import reset, served
from tests.helpers.processes import children_of, is_running
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout(240)
SERVER = Path(__file__).resolve().parents[2] / "helpers" / "imports" / "mcp_server.py"
COMMAND = shlex.join([sys.executable, str(SERVER)])
OK, SANDBOX_ERROR = types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_SANDBOX_ERROR


async def make(stub, turn, *calls, session="s"):
    """A turn of these calls; the answer."""
    request = environment_pb2.StepRequest(session_id=session, turn=turn, text=f"turn {turn}")
    for name, arguments in calls:
        request.tool_calls.add(name=name, arguments_json=json.dumps(arguments))
    return await call(stub.Step, request, peer="environment", timeout_s=100)


def texts(response):
    assert response.status in (0, OK), response.message
    assert {each.role for each in response.messages} <= {"tool"}
    return [each.content for each in response.messages]


async def closed(stub, *sessions):
    """Close sessions, and wait until their programs have ended."""
    for name in sessions:
        await call(stub.Close, environment_pb2.CloseRequest(session_id=name), peer="environment")
    await until(lambda: not programs(), timeout_s=20)


def programs():
    """Programs of this process's sessions that run."""
    return {pid for pid in children_of(os.getpid()) if is_running(pid) and str(SERVER).encode() in of(pid, "cmdline")}


def of(pid, what):
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # it has just ended
        return b""


async def test_tools_over_stdio_are_offered_called_bounded_and_played_again(monkeypatch):
    monkeypatch.setenv("OF_NOBODY", "secret")
    factory = load_environment(f"mcp:{COMMAND}?timeout_s=20&max_calls=6&max_characters=200")
    async with served(factory) as (_, stub):
        described = await call(stub.GetEnvironment, environment_pb2.GetEnvironmentRequest(), peer="environment")
        functions = {tool["function"]["name"]: tool["function"] for tool in json.loads(described.tools_json)}
        assert functions["add"]["description"] == "Add two numbers."
        assert functions["add"]["parameters"]["required"] == ["a", "b"]
        for name in ("s", "other"):
            await reset(stub, name)
        assert not programs()

        told = await make(stub, 0, ("add", {"a": 2, "b": 3}), ("remember", {"number": 4}), ("nothing", {}))
        assert texts(told)[:2] == ["5", "4"]
        assert "there is no tool 'nothing'; there are add, " in texts(told)[2]
        # Another session has a program of its own, and each sees none of this process's secrets.
        assert texts(await make(stub, 0, ("remember", {"number": 1}), session="other")) == ["1"]
        first = programs()
        assert len(first) == 2
        assert not any(b"OF_NOBODY" in of(pid, "environ") for pid in first)

        # Both programs die; the calls so far are made again by the next turn, the others' not.
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        odd = await make(stub, 1, ("remember", {"number": 3}), ("add", {"a": "x", "b": 1}), ("long", {"length": 300}))
        assert texts(odd)[0] == "7"
        assert "int" in texts(odd)[1]
        assert texts(odd)[2] == f"{'x' * 200}\n[100 characters are cut off]"
        assert texts(await make(stub, 2, ("fail", {}), ("add", {"a": 1, "b": 1})))[1].startswith("no calls are left: 6")
        done = await make(stub, 3)
        assert (done.done, done.HasField("reward"), done.status) == (True, False, OK)
        await closed(stub, "s", "other")


async def test_what_a_program_fails_at_is_an_error_by_name_and_no_reward():
    async with served(load_environment(f"mcp:{COMMAND}?timeout_s=15")) as (_, stub):
        for name, arguments, said in (
            ("crash", {}, "crash: Connection closed"),
            ("wait", {"seconds": 30}, "timed out"),
            ("long", {"length": 5_000_000}, "long: Connection closed"),
        ):
            await reset(stub, name)
            answer = await make(stub, 0, ("add", {"a": 1, "b": 1}), (name, arguments), session=name)
            assert (answer.done, answer.status, answer.HasField("reward")) == (True, SANDBOX_ERROR, False)
            assert said in answer.message
        await closed(stub, "crash", "wait", "long")


@contextmanager
def http_server(port=0):
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/mcp", process, port
    finally:
        process.kill()
        process.wait(timeout=20)


async def loaded_once_it_answers(name):
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(load_environment, name)
            except EnvironmentLoadError:
                await asyncio.sleep(0.2)


async def test_tools_over_http_are_called_and_survive_their_server():
    with http_server() as (url, process, port):
        name = f"mcp:{url}?timeout_s=30&tools=add,long,crash"
        own = await loaded_once_it_answers(name)
        assert [tool["function"]["name"] for tool in own.tools] == ["add", "long", "crash"]
        shared = load_environment(f"{name}&shared=true")
        async with served(own) as (_, stub), served(shared) as (_, sharing):
            for each in (stub, sharing):
                await reset(each)
                assert texts(await make(each, 0, ("add", {"a": 2, "b": 3}), ("long", {"length": 9}))) == ["5", "x" * 9]
            process.kill()
            process.wait(timeout=20)
            with http_server(port) as _:
                await loaded_once_it_answers(name)
                for each in (stub, sharing):
                    assert texts(await make(each, 1, ("add", {"a": 1, "b": 1}))) == ["2"]
            for each in (stub, sharing):
                away = await make(each, 2, ("add", {"a": 1, "b": 1}))
                assert (away.status, away.HasField("reward")) == (SANDBOX_ERROR, False), away
                await closed(each, "s")


def test_names_that_lead_to_no_tools_say_what_to_write(monkeypatch):
    monkeypatch.delenv("NO_SUCH", raising=False)
    for name, said in (
        ("mcp:", "mcp:COMMAND"),
        ("mcp:/no/such/program", "No such file"),
        ("mcp:true", "true: "),
        ("mcp:true?shared=1", "must be true or false"),
        ("mcp:true?max_calls=0", "max_calls: 0"),
        ("mcp:true?token=X", "token: is for an address"),
        ("mcp:true?env=NO_SUCH", "'NO_SUCH' is not set"),
        ("mcp:http://localhost:1/mcp?env=X", "env: is for a command"),
        ("mcp:http://127.0.0.1:1/mcp?timeout_s=5", "127.0.0.1:1"),
        (f"mcp:{COMMAND}?tools=nothing", "the server has no 'nothing'; it has add, "),
    ):
        with pytest.raises(EnvironmentLoadError, match="environment") as raised:
            load_environment(name)
        assert said in str(raised.value)
