"""`penstock node` whose scheduler has no plan, or refuses it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import structlog
import yaml
from prometheus_client import CollectorRegistry

from console.node.config import NodeConfig
from console.node.node import NodeAgent
from penstock.clock import SystemClock
from penstock.network.rpc import Service, service_of
from penstock.security import NO_SECURITY, Security
from services.scheduler.config import LengthsConfig
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from tests.helpers.console import COMMAND, environment
from tests.helpers.serving import serving
from tests.helpers.waiting import until


def _scheduler() -> Service:
    clock = SystemClock()
    lengths = make_forecaster(LengthsConfig(), clock=clock, registry=CollectorRegistry())
    return service_of(SchedulerServicer(clock=clock, heartbeat_interval_s=1.0, lengths=lengths))


def _document(folder: Path, scheduler: str) -> dict[str, object]:
    return {
        "node_id": "n",
        "gpu": "L4",
        "scheduler": scheduler,
        "dir": str(folder / "node"),
        "generator": {
            "run_id": "r",
            "broker": "127.0.0.1:1",
            "weights": "127.0.0.1:1",
            "listen": "127.0.0.1:0",
            "model_path": str(folder),
            "cache_dir": str(folder / "cache"),
            "engine": {"engine": "emulated"},
            "emulated": {"gpu": "L4"},
        },
    }


async def test_a_machine_says_that_it_waits_for_a_plan(tmp_path: Path) -> None:
    async with serving(_scheduler()) as (_, target):
        config = NodeConfig.model_validate(_document(tmp_path, target))
        with structlog.testing.capture_logs() as said:
            node = asyncio.create_task(NodeAgent(config, security=NO_SECURITY).run())
            await until(lambda: any("waiting for a plan" in entry["event"] for entry in said), timeout_s=30)
            node.cancel()
            await asyncio.gather(node, return_exceptions=True)
    told = [entry for entry in said if "waiting for a plan" in entry["event"]]
    assert [(entry["scheduler"], entry["run_id"]) for entry in told] == [(target, "r")]


@pytest.mark.parametrize("token", ["wrong", ""])
async def test_a_machine_with_a_bad_token_ends_at_once_in_one_line(tmp_path: Path, token: str) -> None:
    path = tmp_path / "node.yaml"
    async with serving(_scheduler(), security=Security(token="right", allows_plain=True)) as (_, target):
        path.write_text(yaml.safe_dump(_document(tmp_path, target)))
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            "node",
            str(path),
            env={**os.environ, **environment(), "PENSTOCK_TOKEN": token, "PENSTOCK_INSECURE": "true"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            _, stderr = await process.communicate()
    lines = [line for line in stderr.decode().splitlines() if line.startswith("penstock: ")]
    assert process.returncode == 2, stderr.decode()
    assert len(lines) == 1
    assert "token" in lines[0]
    assert "Traceback" not in stderr.decode()
