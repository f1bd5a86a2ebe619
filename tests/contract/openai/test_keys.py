"""An agent's key opens its own sessions alone, and nothing of the cluster."""

from __future__ import annotations

import importlib.util
import ssl
from pathlib import Path

import aiohttp
import openai
import pytest

from penstock.errors import BadTokenError
from penstock.network import rpc
from penstock.security import Security
from penstock.security.session_keys import Opens, SessionKey, SessionKeys
from penstock.v1 import broker_pb2_grpc
from tests.contract.security.test_access import METHODS, _call, _recorded
from tests.helpers.brokers.broker import RUN
from tests.helpers.certificates import issue, make_authority
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.serving import serving
from tests.helpers.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECRET, OTHER_SECRET = "s" * 32, "o" * 32
ENVIRONMENT = "environment:0123456789abcdef"
SECURED = Security(token="the-operators", accepted_tokens=(ENVIRONMENT,), allows_plain=True)
HELLO = [{"role": "user", "content": "hello"}]
FAR = 4_000_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def key_for(session, *, secret=SECRET, run_id=RUN, **more):
    return SessionKeys(run_id, secret).issue(SessionKey(run_id=run_id, session=session, **({"expire_s": FAR} | more)))


def bench_of(model, **settings):
    return endpoint_bench(model, **({"security": SECURED, "secret": SECRET} | settings))


async def chat(bench, key, session=None, group=None):
    return await bench.client(session, group, api_key=key).chat.completions.create(model="tiny", messages=HELLO)


async def ask(bench, method, path, *, key, body=None, headers=None):
    """Status and document of an answer."""
    sent = {"Authorization": f"Bearer {key}"} | (headers or {})
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, bench.base_url + path, json=body, headers=sent) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_key_opens_its_own_sessions_and_no_others(model):
    async with bench_of(model) as bench:
        one, many = key_for("task7"), key_for("task7-*")
        await chat(bench, one, "task7")
        for session in ("task7-0", "task7-1", "task7-"):
            await chat(bench, many, session)
        assert (await bench.client(api_key=one).models.list()).data[0].id == "tiny"
        asked = len(bench.engine.requests)
        foreign = ("task70", "task8", "task", "TASK7-0", "other-task7-0", "*")
        for key, sessions in ((one, ("task7-0", "task7*", *foreign)), (many, ("task7", *foreign))):
            for session in sessions:
                with pytest.raises(
                    openai.PermissionDeniedError, match="not open to the key of session 'task7"
                ) as found:
                    await chat(bench, key, session)
                assert found.value.code == "forbidden"
        with pytest.raises(openai.BadRequestError, match=r"X-Penstock-Session: missing; the key of session 'task7-\*'"):
            await chat(bench, many)
        assert len(bench.engine.requests) == asked


async def test_what_is_sent_again_without_a_header_is_answered_once(model):
    async with bench_of(model) as bench:
        client = bench.client(api_key=key_for("task7"), default_headers={"Idempotency-Key": "k"})
        ids = [(await client.chat.completions.create(model="tiny", messages=HELLO)).id for _ in range(2)]
        assert ids[0] == ids[1]
        assert len(bench.engine.requests) == 1


async def test_without_a_header_the_session_is_the_keys_own_and_its_group_too(model):
    async with bench_of(model) as bench:
        for index in (0, 1):
            key = key_for(f"task7-{index}", group="task7")
            await chat(bench, key)
            status, said = await ask(
                bench, "POST", f"/sessions/task7-{index}/reward", key=ENVIRONMENT, body={"reward": 1}
            )
            assert (status, said["status"]) == (200, "ok")
        (group,) = await bench.groups(1)
    assert len(group.trajectories) == 2


async def test_a_key_joins_no_group_of_others(model):
    async with bench_of(model) as bench:
        bound, free = key_for("task7-0", group="task7"), key_for("task7-*")
        await chat(bench, bound, group="task7")
        await chat(bench, free, "task7-1", "task7-hard")
        for key, group in ((bound, "task8"), (bound, "task7-0"), (free, "task8"), (free, "task7")):
            with pytest.raises(openai.PermissionDeniedError, match="group"):
                await chat(bench, key, "task7-0", group)


async def test_an_agent_does_not_reward_itself_unless_its_key_says_so(model):
    async with bench_of(model) as bench:
        plain = key_for("task7-0")
        rewarding = key_for("task7-0", opens=(Opens.REWARD,))
        both = key_for("task8-0", opens=tuple(Opens))
        await chat(bench, plain, "task7-0")
        await chat(bench, both, "task8-0")
        for key, path in (
            (plain, "/sessions/task7-0/reward"),
            (both, "/sessions/task7-0/reward"),
            (rewarding, "/sessions/task8-0/reward"),
            (both, "/sessions/task7%2D0/reward"),
        ):
            status, said = await ask(bench, "POST", path, key=key, body={"reward": 1})
            assert (status, said["error"]["type"]) == (403, "permission_error"), said
        with pytest.raises(openai.PermissionDeniedError, match="is not open to the key"):
            await chat(bench, rewarding, "task7-0")
        assert (await ask(bench, "POST", "/sessions/task7-0/reward", key=rewarding, body={"reward": 1}))[0] == 200
        assert (await ask(bench, "POST", "/sessions/task8-0/reward", key=both, body={"reward": 1}))[0] == 200


async def test_a_key_opens_nothing_else_here(model):
    async with bench_of(model) as bench:
        key = key_for("task7-*", opens=tuple(Opens))
        await chat(bench, key, "task7-0")
        for method, path, body in (
            ("GET", "/sessions/task7-0", None),
            ("DELETE", "/sessions/task7-0", None),
            ("POST", "/session_keys", {"session": "task8"}),
            ("GET", "/nothing", None),
        ):
            status, said = await ask(bench, method, path, key=key, body=body)
            assert status == 403
            assert said["error"]["code"] == "forbidden"
        assert (await ask(bench, "GET", "/sessions/task7-0", key=ENVIRONMENT))[0] == 200


def forged(key):
    """Keys that were tampered with."""
    head, _, mac = key.rpartition(".")
    other = key_for("task8").partition(".")[0]
    yield from (f"{other}.{mac}", f"{head}.{'0' * len(mac)}", head, f"{head}.", key[:-1], f"{key}0", "sk-penstock-")
    yield from (f"{head}=.{mac}", f"{head}.{mac.upper()}" if mac.upper() != mac else head, "sk-penstock-\u00e9.x")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (key_for("task7", secret=OTHER_SECRET), "did not make it, or its secret has changed"),
        (key_for("task7", run_id="other"), "it is for run 'other'"),
        (key_for("task7", expire_s=1), "expired at 1970-01-01"),
        ("none", "missing or wrong API key"),
        ("sk-1234", "missing or wrong API key"),
    ],
)
async def test_refused_keys_get_an_error_in_openais_form(model, key, problem):
    async with bench_of(model) as bench:
        with pytest.raises(openai.AuthenticationError, match=problem) as caught:
            await chat(bench, key, "task7")
        assert caught.value.code == "invalid_api_key"
        assert caught.value.body["type"] == "authentication_error"
        assert not bench.engine.requests


def test_no_change_to_a_key_leaves_it_valid():
    keys = SessionKeys(RUN, SECRET)
    key = key_for("task7")
    assert keys.read(key, now_s=0).session == "task7"
    for changed in forged(key):
        with pytest.raises(BadTokenError, match="did not make it"):
            keys.read(changed, now_s=0)


async def test_the_environment_makes_keys_which_any_generator_takes_also_after_a_restart(model):
    async with bench_of(model) as bench:
        body = {"session": "task7-0", "group": "task7", "valid_s": 60, "opens": ["complete", "reward"]}
        status, made = await ask(bench, "POST", "/session_keys", key=ENVIRONMENT, body=body)
        assert status == 200
        assert (made["session"], made["group"], made["opens"]) == ("task7-0", "task7", ["complete", "reward"])
        for wrong in ({"session": ""}, {"session": "a b"}, {"session": "s", "valid_s": 1e9}, {"session": "s", "x": 1}):
            assert (await ask(bench, "POST", "/session_keys", key=ENVIRONMENT, body=wrong))[0] == 400
    async with bench_of(model) as another:
        await chat(another, made["key"])
        assert (await ask(another, "POST", "/sessions/task7-0/reward", key=made["key"], body={"reward": 1}))[0] == 200
    async with bench_of(model, secret=None) as without:
        with pytest.raises(openai.AuthenticationError):
            await chat(without, made["key"])


async def test_with_only_a_secret_every_call_needs_a_key(model):
    async with bench_of(model, security=Security()) as bench:
        with pytest.raises(openai.AuthenticationError):
            await chat(bench, "none")
        await chat(bench, key_for("task7"))


async def test_on_loopback_without_credentials_keys_work_and_are_not_needed(model):
    async with bench_of(model, security=Security(), secret=None) as bench:
        await chat(bench, "none")
        _, made = await ask(bench, "POST", "/session_keys", key="none", body={"session": "task7"})
        await chat(bench, made["key"], "task7")
        with pytest.raises(openai.PermissionDeniedError):
            await chat(bench, made["key"], "task8")


async def test_under_tls_a_key_is_taken_instead_of_a_certificate(model, tmp_path):
    authority = make_authority(tmp_path / "authority")
    security = issue(authority, roles=["generator"], name="gen-0")
    tls = ssl.create_default_context(cafile=str(security.ca_file))
    async with (
        bench_of(model, security=security) as bench,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
    ):
        for key, expected in ((key_for("task7"), 200), ("none", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(f"{bench.base_url}/models", headers=headers) as answer:
                assert answer.status == expected
        async with session.get(f"{bench.base_url}/models") as answer:
            assert answer.status == 401


@pytest.mark.parametrize(("roles", "is_put"), [("generator+environment", True), ("generator", False)])
async def test_a_generator_puts_agents_groups_as_an_environment(model, roles, is_put):
    own = f"{roles}@{RUN}:0123456789abcdef"
    broker = Security(token="the-operators", accepted_tokens=(own,), allows_plain=True)
    async with bench_of(
        model, security=Security(token=own, allows_plain=True), broker_security=broker, limits={"group_size": 1}
    ) as bench:
        key = key_for("task7", opens=tuple(Opens))
        await chat(bench, key)
        assert (await ask(bench, "POST", "/sessions/task7/reward", key=key, body={"reward": 1}))[0] == 200
        await until(lambda: bench.outcomes["put" if is_put else "forbidden"] == 1)
        if is_put:
            assert len(await bench.groups(1)) == 1


async def test_the_examples_agent_solves_its_task_with_a_key_of_its_session(model, monkeypatch):
    spec = importlib.util.spec_from_file_location("example_agent", ROOT / "examples" / "openai_agent" / "agent.py")
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    solve, keys = agent.solve, []

    async def noted(client, *arguments):
        keys.append(client.api_key)
        return await solve(client, *arguments)

    monkeypatch.setattr(agent, "solve", noted)
    async with endpoint_bench(model, lambda _prompt: "5", security=SECURED, secret=SECRET) as bench:
        assert await agent.attempt(bench.client(api_key=ENVIRONMENT), "tiny", "task7", 0, 2, 3) == 1
    (key,) = (SessionKeys(RUN, SECRET).read(shown, now_s=0) for shown in keys)
    assert (key.session, key.group, key.opens) == ("task7-0", "task7", (Opens.COMPLETE,))


async def test_a_key_makes_no_call_of_the_cluster():
    key = key_for("task7", opens=tuple(Opens))
    broker = next(service for service, _, module in METHODS if module is broker_pb2_grpc)
    recorder, served = _recorded(broker, broker_pb2_grpc)
    async with (
        serving(served, security=SECURED) as (_, target),
        rpc.open_channel(target, Security(token=key, allows_plain=True)) as channel,
    ):
        for service, method, module in METHODS:
            if module is broker_pb2_grpc:
                with pytest.raises(BadTokenError):
                    await _call(channel, service, method)
    assert not recorder.heard
