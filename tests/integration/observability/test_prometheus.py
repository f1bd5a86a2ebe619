"""A real Prometheus reads a real broker by the rules, and says that it is gone."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.brokers.broker import eventually
from tests.helpers.console import COMMAND, ROOT, environment
from tests.helpers.stores.redis_server import free_port

FOLDER = ROOT / "deploy" / "observability"
PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: apt install prometheus)"
)


@contextmanager
def running(*command: str, log: Path) -> Any:
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def in_seconds(rules: str) -> str:
    """The rules with every minute shortened to a second."""
    return re.sub(r"\b(\d+)m\b", r"\1s", rules)


def write_configuration(folder: Path, broker: str) -> Path:
    for name in ("alerts.yml", "recording.yml"):
        (folder / name).write_text(in_seconds((FOLDER / name).read_text()))
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    [job] = [job for job in settings["scrape_configs"] if job["job_name"] == "penstock-broker"]
    del job["dns_sd_configs"], settings["alerting"]
    settings["scrape_configs"] = [job | {"static_configs": [{"targets": [broker]}]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(settings))
    return path


async def asked(address: str, path: str) -> Any:
    def ask() -> Any:
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=5) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    return await asyncio.to_thread(ask)


async def test_a_broker_that_is_gone_is_told(tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    metrics, prometheus = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    path = write_configuration(tmp_path, metrics)
    serve = (*COMMAND, "serve", "broker", "redis_url=memory://", "listen=127.0.0.1:0", f"metrics_listen={metrics}")
    options = (
        f"--config.file={path}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address={prometheus}",
    )

    async def health() -> list[str]:
        found = await asked(prometheus, "targets")
        return [target["health"] for target in (found or {}).get("activeTargets", [])]

    async def firing() -> list[str]:
        found = await asked(prometheus, "alerts")
        return [alert["labels"]["alertname"] for alert in found["alerts"] if alert["state"] == "firing"]

    with ExitStack() as stack:
        broker = stack.enter_context(running(*serve, log=tmp_path / "broker.log"))
        stack.enter_context(running(PROMETHEUS, *options, log=tmp_path / "prometheus.log"))

        async def is_read() -> bool:
            return await health() == ["up"]

        async def is_told() -> bool:
            return await firing() == ["PenstockServiceDown"]

        await eventually(is_read, timeout_s=60.0)
        assert "PenstockServiceDown" not in await firing()
        broker.kill()
        await eventually(is_told, timeout_s=60.0)
