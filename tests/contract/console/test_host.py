"""`penstock node` on a machine without GPUs: broker, Redis and scheduler of a plan, over mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from console.config.run_folder import RunFolder
from console.launch.probes import service_problem
from console.node.config import HostConfig
from console.node.host import HostAgent
from penstock.network.rpc import call, open_channel
from penstock.process.tasks import end, race
from penstock.security import Security
from penstock.v1 import broker_pb2, broker_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.helpers.brokers.broker import limits
from tests.helpers.certificates import issue, make_authority
from tests.helpers.ports import free_addresses
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def running(config: HostConfig, security: Security) -> AsyncIterator[tuple[HostAgent, asyncio.Task[None]]]:
    """A host at work, which leaves nothing behind even where a test fails."""
    host = HostAgent(config, security=security)
    task = asyncio.create_task(host.run())
    try:
        yield host, task
    finally:
        await end(task)
        await host.leave()


async def up(kind: str, target: str, security: Security) -> None:
    async with asyncio.timeout(60):
        while await service_problem(target, kind, security=security, timeout_s=1.0):  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.1)


async def leave(host: HostAgent, broker: str, operator: Security) -> None:
    """Everybody is told to end at once: its brokers serve on until the trainer is gone, though they know each other."""
    with capture_logs() as logs:
        async with open_channel(broker, operator) as channel:
            stub = broker_pb2_grpc.BrokerServiceStub(channel)
            await call(stub.GetRun, broker_pb2.GetRunRequest(run_id="r"), peer=broker)
            leaving = asyncio.create_task(host.leave())
            await until(lambda: "the broker serves on" in {line["event"] for line in logs}, timeout_s=30)
            await call(stub.GetRun, broker_pb2.GetRunRequest(run_id="r"), peer=broker)
            assert not leaving.done()
        async with asyncio.timeout(40):
            await leaving


async def test_a_host_keeps_what_its_broker_stored_and_serves_the_roles_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path / "authority")
    own = issue(authority, roles=["broker"], run="r", name="desk")
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"PENSTOCK_TLS_{name.upper()}", str(getattr(own, f"{name}_file")))
    generator = issue(authority, roles=["generator"], run="r", name="gpu")
    operator = issue(authority, name="head")
    broker, second, scheduler = free_addresses(3)
    document = {
        "node_id": "desk",
        "dir": str(tmp_path / "desk"),
        "brokers": [{"listen": listen, "scheduler": scheduler} for listen in (broker, second)],
        "scheduler": {"listen": scheduler},
        "client_wait_s": 60.0,
    }
    config = HostConfig.model_validate(document)
    folder = RunFolder(config.dir)

    for start in ("first", "second"):
        async with running(config, own) as (host, task):
            # The host's own error tells more than services that are not up.
            starting = [up("scheduler", scheduler, generator)]
            starting += [up("broker", each, generator) for each in (broker, second)]
            await race(asyncio.gather(*starting), asyncio.shield(task))
            async with open_channel(scheduler, generator) as channel:
                nodes = scheduler_pb2_grpc.SchedulerServiceStub(channel).ListNodes
                assert not (await call(nodes, scheduler_pb2.ListNodesRequest(), peer=scheduler)).nodes
            async with open_channel(broker, operator) as channel:
                stub = broker_pb2_grpc.BrokerServiceStub(channel)
                if start == "first":
                    await call(stub.OpenRun, broker_pb2.OpenRunRequest(run_id="r", limits=limits()), peer=broker)
            # Both brokers have the one Redis.
            async with open_channel(second, operator) as channel:
                stub = broker_pb2_grpc.BrokerServiceStub(channel)
                await call(stub.GetRun, broker_pb2.GetRunRequest(run_id="r"), peer=second)
            await end(task)
            await leave(host, broker, operator)
            assert not any(record.is_alive for record in folder.records())
    assert (folder.redis / "appendonlydir").is_dir() or any(folder.redis.glob("*.aof"))
