"""A whole run, as processes, whose Redis is away for longer than any back-off: it waits, says so, and goes on."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from console.inspect.status import status_command
from penstock.network.rpc import open_channel
from tests.e2e.runs import Run, running, small_run
from tests.helpers.broker_model.profile import IS_LONG
from tests.helpers.console import write_rows
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.stores.redis_server import RedisProcess

pytestmark = pytest.mark.timeout(600)
SERVICES = ("trainer", "generator-0", "reward")
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="takes three minutes; PENSTOCK_HYPOTHESIS=long runs it")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path, is_persistent=True)
    process.start()
    yield process
    process.kill()


def _document(folder: Path, redis: RedisProcess) -> dict[str, Any]:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    train = write_rows(folder / "train.jsonl", *rows)
    task = SimpleNamespace(model_dir=make_tiny_model(folder / "model"), train_path=train, eval_path=None)
    document = small_run(
        task,  # type: ignore[arg-type]
        folder,
        run__num_steps=100_000,
        run__num_eval_prompts=0,
        algorithm__prompts_per_step=2,
        sampling__max_new_tokens=16,
    )
    del document["data"]["eval"]
    return document | {"broker": {"redis_url": redis.url}}


async def _is_serving(address: str) -> bool:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _serving(run: Run) -> dict[str, bool]:
    addresses = {record.name: record.address for record in run.folder.records()}
    return {name: asyncio.run(_is_serving(addresses[name])) for name in SERVICES}


def _status(run: Run, capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> tuple[int, str]:
    capsys.readouterr()
    status = status_command(
        str(run.folder.path), broker=None, runs_dir=run.folder.path.parent, is_watched=False, as_json=as_json
    )
    return status, capsys.readouterr().out


def _outlast(
    run: Run, redis: RedisProcess, capsys: pytest.CaptureFixture[str], *, is_killed: bool, away_s: float
) -> None:
    """One outage: the run stands still and says so, and goes on when Redis is back."""
    assert _serving(run) == dict.fromkeys(SERVICES, True)
    begun_s = time.monotonic()
    (redis.kill if is_killed else redis.pause)()
    run.wait_for("health off", lambda: not any(_serving(run).values()), timeout_s=90)
    assert time.monotonic() - begun_s >= 10
    status, told = _status(run, capsys)
    assert status == 1
    assert "Redis is away (" in told
    assert "waiting for broker 127.0.0.1:" in told
    assert " since 20" in told
    document = json.loads(_status(run, capsys, as_json=True)[1])
    assert "Redis is away" in document["broker_problem"]
    assert "waiting for broker" in document["trainer"]["message"]
    num_steps = run.num_steps
    run.wait_for("the outage's end", lambda: time.monotonic() - begun_s > away_s)
    assert run.num_steps == num_steps
    (redis.start if is_killed else redis.resume)()
    run.wait_for_step(num_steps + 3)
    run.wait_for("health on", lambda: all(_serving(run).values()), timeout_s=60)
    assert _status(run, capsys)[0] == 0
    assert {record.num_restarts for record in run.folder.records()} == {0}


@pytest.mark.parametrize(
    "outages",
    [[(True, 20.0), (False, 20.0)], pytest.param([(True, 130.0)], marks=LONG_ONLY)],
    ids=["killed and hangs", "killed for long"],
)
def test_a_run_outlasts_its_redis(
    tmp_path: Path, redis: RedisProcess, capsys: pytest.CaptureFixture[str], outages: list[tuple[bool, float]]
) -> None:
    with running(_document(tmp_path, redis), tmp_path) as run:
        run.wait_for_step(2)
        for is_killed, away_s in outages:
            _outlast(run, redis, capsys, is_killed=is_killed, away_s=away_s)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        audit = run.summary()["audit"]
        assert audit["balanced"] is True
        assert audit["trained"] == 8 * run.summary()["steps"]
