"""Reward models of third parties see credentials of their own and never the cluster's, whoever calls them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from console.recording.writer import open_writer
from console.run.preflight import reward_problems
from console.serve.rewards import check_reward
from console.trajectories.rescore_recording import rescore_command
from penstock.config import ConfigError
from penstock.network.rpc import service_of
from penstock.rewards.serving import serve_async
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from services.reward.config import RewardConfig
from services.reward.server import serve
from tests.helpers.brokers.recordings import recorded
from tests.helpers.brokers.scripted_scoring import ScriptedBroker, scoring_item
from tests.helpers.certificates import issue, make_authority
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.ports import free_address
from tests.helpers.serving import serving
from tests.helpers.waiting import until

CLUSTER_TOKEN, JUDGE_TOKEN = "the-clusters-own", "the-judges:own"


class Judge(reward_pb2_grpc.RewardServiceServicer, grpc.aio.ServerInterceptor):
    """Scores everything with 1, and remembers all that it is shown."""

    def __init__(self) -> None:
        self.tokens: set[str] = set()
        self.certificates: set[bytes] = set()
        self.methods: set[str] = set()

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        self.methods.add(details.method.rpartition("/")[2])
        self.tokens |= {str(value) for key, value in details.invocation_metadata or () if key == "authorization"}
        return await continuation(details)

    def _see(self, context: Any) -> None:
        self.certificates |= set(context.auth_context().get("x509_common_name", ()))

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self._see(context)
        one = types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0)
        return reward_pb2.ScoreResponse(scores=[one] * len(request.items))

    async def GetRewardModel(self, _request: Any, context: Any) -> reward_pb2.GetRewardModelResponse:
        self._see(context)
        return reward_pb2.GetRewardModelResponse(name="judge")


@asynccontextmanager
async def judging(credentials: grpc.ServerCredentials | None) -> AsyncIterator[tuple[Judge, str]]:
    judge = Judge()
    server = grpc.aio.server(interceptors=[judge])
    reward_pb2_grpc.add_RewardServiceServicer_to_server(judge, server)
    listen = "127.0.0.1:0"
    port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    await server.start()
    try:
        yield judge, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def export(monkeypatch: pytest.MonkeyPatch, prefix: str, security: Security) -> None:
    """Put credentials into the environment."""
    for name, value in (
        ("TOKEN", security.token),
        ("TLS_CA", security.ca_file),
        ("TLS_CERT", security.cert_file),
        ("TLS_KEY", security.key_file),
    ):
        if value is not None:
            monkeypatch.setenv(f"{prefix}_{name}", str(value))


class World:
    """A cluster with all its credentials in the environment, and a judge's beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours, self.theirs = make_authority(folder / "ours"), make_authority(folder / "theirs")
        self.cluster = issue(self.ours, name="cluster", token=CLUSTER_TOKEN)
        self.for_judges = issue(self.theirs, name="customer", token=JUDGE_TOKEN)
        judge = issue(self.theirs, name="judge")
        # Its server would take the cluster's certificate, too, if it were shown.
        roots = b"".join(Path(str(each.ca_file)).read_bytes() for each in (judge, self.cluster))
        pair = (Path(str(judge.key_file)).read_bytes(), Path(str(judge.cert_file)).read_bytes())
        self.server_credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("judges"))


async def by_the_worker(world: World, target: str, judge: Judge) -> None:
    broker = ScriptedBroker([scoring_item(0)])
    async with serving(broker.service(), security=world.cluster) as (_, broker_target):
        config = RewardConfig(
            listen="127.0.0.1:0",
            run_id="r",
            broker=broker_target,
            reward={"model": f"grpc://{target}", "trusts_generator_text": True},
        )
        worker = asyncio.create_task(serve(config))
        try:
            await until(lambda: worker.done() or "GetRewardModel" in judge.methods)
            if judge.tokens:
                await until(lambda: worker.done() or broker.results)
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


async def by_the_endpoint(world: World, target: str, judge: Judge) -> None:
    model = save_chat_model(world.folder / "chat")
    security = Security(token=CLUSTER_TOKEN, allows_plain=True)
    judges = Security.from_environment(JUDGES)
    async with endpoint_bench(model, security=security, judges=judges, reward=f"grpc://{target}") as bench:
        client = bench.client("s", "t", api_key=CLUSTER_TOKEN)
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "?"}])
        await client.post("/sessions/s/reward", cast_to=object, body={})


async def by_the_check(_world: World, target: str, _judge: Judge) -> None:
    await asyncio.to_thread(check_reward, target)


async def by_rescoring(world: World, target: str, _judge: Judge) -> None:
    file = world.folder / f"{target}.jsonl"
    writer = open_writer(file)
    sample = recorded()
    sample.trajectory.loss_mask = b""
    writer.write([sample])
    writer.close()
    out = file.with_suffix(".out.jsonl")
    await asyncio.to_thread(rescore_command, file, reward=target, out=out, as_json=True)


async def by_the_preflight(_world: World, target: str, _judge: Judge) -> None:
    assert await reward_problems([f"grpc://{target}"], is_insecure=False) == []


CALLERS = [by_the_worker, by_the_endpoint, by_the_check, by_rescoring, by_the_preflight]


@pytest.mark.parametrize("call", CALLERS)
async def test_a_judge_is_shown_its_own_token_and_certificate(world, monkeypatch, call):
    export(monkeypatch, "PENSTOCK", world.cluster)
    export(monkeypatch, JUDGES, world.for_judges)
    async with judging(world.server_credentials) as (judge, target):
        await call(world, target, judge)
    assert judge.methods
    assert judge.tokens == {f"Bearer {JUDGE_TOKEN}"}
    assert judge.certificates <= {b"customer"}
    assert judge.certificates or call is by_the_preflight


@pytest.mark.parametrize("call", CALLERS)
async def test_a_judge_without_credentials_of_its_own_is_shown_nothing(world, monkeypatch, call):
    export(monkeypatch, "PENSTOCK", world.cluster)
    async with judging(None) as (judge, target):
        await call(world, target, judge)
    assert judge.methods
    assert not judge.tokens


async def test_a_judges_token_does_not_go_over_a_plain_socket(monkeypatch):
    monkeypatch.setenv("PENSTOCK_JUDGE_TOKEN", JUDGE_TOKEN)
    async with judging(None) as (judge, target):
        with pytest.raises(ConfigError, match="PENSTOCK_JUDGE_TLS_CA: missing beside PENSTOCK_JUDGE_TOKEN"):
            check_reward(target)
    assert not judge.methods


async def test_who_is_refused_by_a_judge_learns_which_credentials_it_showed(world, monkeypatch, capsys):
    export(monkeypatch, "PENSTOCK", world.cluster)
    export(monkeypatch, JUDGES, issue(world.theirs, name="customer", token="wrong"))
    server = issue(world.theirs, name="judge", token="right")

    async with serving(service_of(Judge()), security=server) as (
        _,
        target,
    ):
        assert await asyncio.to_thread(check_reward, target) == 1
    assert "it is shown PENSTOCK_JUDGE_TOKEN and PENSTOCK_JUDGE_TLS_*" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["PENSTOCK_TOKEN", "PENSTOCK_TLS_CERT"])
async def test_a_served_reward_model_never_falls_back_to_the_clusters_credentials(monkeypatch, variable):
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ConfigError, match="PENSTOCK_JUDGE_TOKEN: not set, while the cluster's credentials are"):
        await serve_async(lambda completion: 1.0, listen="127.0.0.1:0")


def test_a_served_reward_model_takes_the_judges_token_and_not_the_clusters(world, monkeypatch, tmp_path):
    address = free_address()
    export(monkeypatch, "PENSTOCK", world.cluster)
    export(monkeypatch, JUDGES, issue(world.theirs, name="judge", token="of-the-judge"))
    (tmp_path / "mine.py").write_text("def judge(completion: str) -> float:\n    return 1.0\n")
    command = [sys.executable, "-m", "console", "reward", "serve", "mine:judge", "--listen", address]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        while asyncio.run(reward_problems([f"grpc://{address}"], is_insecure=False)):
            assert process.poll() is None
        assert check_reward(address) == 0
        monkeypatch.setenv("PENSTOCK_JUDGE_TOKEN", CLUSTER_TOKEN)
        assert check_reward(address) == 1
    finally:
        process.terminate()
        process.wait(timeout=30)
