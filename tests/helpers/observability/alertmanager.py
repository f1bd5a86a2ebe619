"""Debian's Alertmanager as a process, with the deployed routes and inhibitions."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.observability.compressed_rules import FOLDER
from tests.helpers.ports import free_address

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
AMTOOL = shutil.which("amtool")
CONFIGURATION = FOLDER / "alertmanager.yml"

needs_alertmanager = pytest.mark.skipif(
    ALERTMANAGER is None or AMTOOL is None,
    reason="the Alertmanager is not installed (Debian: apt install prometheus-alertmanager)",
)


class Alertmanager:
    """A running one; see `alertmanager`."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def post(self, alerts: Iterable[Mapping[str, str]]) -> None:
        """Tell it that alerts with these labels fire, as Prometheus would."""
        body = json.dumps([{"labels": dict(labels)} for labels in alerts]).encode()
        await asyncio.to_thread(self._ask, body)

    async def told(self) -> set[str]:
        """Names of the alerts that receivers are told of."""
        return {alert["labels"]["alertname"] for alert in await self._alerts() if alert["status"]["state"] == "active"}

    async def inhibited(self) -> set[str]:
        """Names of those that are not told because of another one."""
        return {alert["labels"]["alertname"] for alert in await self._alerts() if alert["status"]["inhibitedBy"]}

    async def until(self, *, told: set[str], inhibited: set[str], timeout_s: float = 60.0) -> None:
        """Wait until exactly these alerts are told, and at least those inhibited."""
        deadline_s = time.monotonic() + timeout_s
        while not (await self.told() == told and inhibited <= await self.inhibited()):
            assert time.monotonic() < deadline_s, f"told {await self.told()}, inhibited {await self.inhibited()}"
            await asyncio.sleep(0.2)

    async def _alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await asyncio.to_thread(self._ask, None)
        return found

    def _ask(self, body: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}/api/v2/alerts", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    async def until_ready(self) -> None:
        """Wait until it answers."""
        deadline_s = time.monotonic() + 60.0
        while True:
            try:
                await self._alerts()
            except OSError:
                assert time.monotonic() < deadline_s, "no answer of the Alertmanager"
                await asyncio.sleep(0.1)
            else:
                return


@asynccontextmanager
async def alertmanager(folder: Path) -> AsyncIterator[Alertmanager]:
    """A server with the deployed configuration."""
    assert ALERTMANAGER is not None
    folder.mkdir()  # noqa: ASYNC240 -- a moment
    running = Alertmanager(free_address())
    command = [ALERTMANAGER, f"--config.file={CONFIGURATION}", f"--storage.path={folder / 'data'}"]
    command += [f"--web.listen-address={running.address}", "--cluster.listen-address="]
    with (folder / "alertmanager.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 -- returns at once
    try:
        await running.until_ready()
        yield running
    finally:
        process.kill()
        process.wait()
