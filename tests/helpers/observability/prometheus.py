"""Debian's Prometheus as a process, over services of a test, with the deployed rules."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.observability.compressed_rules import FOLDER, RULE_FILES, write_rules
from tests.helpers.ports import free_address

PROMETHEUS = shutil.which("prometheus")
FACTOR = 120
"""By which tests compress time: an alert that waits for half an hour fires after 15 s."""
SCRAPE_EVERY = "500ms"
START_TIMEOUT_S = 180.0
PATIENCE_S = 240.0
"""For what takes seconds where a core is free."""

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: apt install prometheus)"
)


class Prometheus:
    """A running server; see `prometheus`."""

    def __init__(self, folder: Path, address: str) -> None:
        self._targets_file = folder / "targets.json"
        self._address = address
        self._targets: list[tuple[str, str]] = []
        self._write_targets()

    @property
    def targets_file(self) -> Path:
        """What is scraped."""
        return self._targets_file

    def watch(self, service: str, address: str) -> str:
        """Scrape a service's metrics from now on, under the job that the deployed configuration has for it."""
        self._targets.append((f"penstock-{service}", address))
        self._write_targets()
        return address

    def forget(self, address: str) -> None:
        """Scrape it no more."""
        self._targets = [target for target in self._targets if target[1] != address]
        self._write_targets()

    async def query(self, path: str, **parameters: str) -> Any:
        """`data` of its answer at /api/v1/PATH; None while it does not answer."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

        def ask() -> Any:
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    return json.load(answer)["data"]
            except OSError:
                return None

        return await asyncio.to_thread(ask)

    async def value(self, expression: str) -> float | None:
        """The value of an expression with one series; None without any."""
        found = await self.query("query", query=expression)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    async def firing(self) -> list[dict[str, str]]:
        """The labels of the alerts that fire."""
        found = await self.query("alerts")
        alerts = [] if found is None else found["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    async def names_firing(self) -> set[str]:
        """Their names."""
        return {labels["alertname"] for labels in await self.firing()}

    async def has_read(self, address: str) -> bool:
        """Whether the newest scrape of a service succeeded."""
        return address in await self.up()

    async def up(self) -> dict[str, str]:
        """The jobs of the targets whose newest scrape succeeded, by instance."""
        found = await self.query("targets")
        targets = [] if found is None else found["activeTargets"]
        return {one["labels"]["instance"]: one["labels"]["job"] for one in targets if one["health"] == "up"}

    async def until_up(self, jobs: dict[str, str]) -> None:
        """Wait until what answers is exactly what has these jobs, by instance."""

        async def is_so() -> bool:
            return await self.up() == jobs

        await self.until(is_so, f"not {jobs} up", PATIENCE_S)

    async def ever_fired(self) -> set[str]:
        """Names of all alerts that have fired since it was started.

        But for PenstockServiceDown: on a busy machine scrapes run out of time, and compressed it waits for one second.
        """
        found = await self.query("query", query='max_over_time(ALERTS{alertstate="firing"}[1d])')
        return {series["metric"]["alertname"] for series in found["result"]} - {"PenstockServiceDown"}

    async def until_read(self, *addresses: str) -> None:
        """Wait until the services answer."""
        for address in addresses:
            await self.until(lambda address=address: self.has_read(address), f"no scrape of {address}", PATIENCE_S)

    async def until_fires(self, alert: str, *, timeout_s: float = PATIENCE_S, **labels: str) -> dict[str, str]:
        """Wait for an alert with these labels; all of its labels. Raises AssertionError with what fires instead."""
        wanted = {"alertname": alert, **labels}
        matching: list[dict[str, str]] = []

        async def is_there() -> bool:
            matching[:] = [found for found in await self.firing() if wanted.items() <= found.items()]
            return bool(matching)

        await self.until(is_there, f"no {wanted}", timeout_s)
        return matching[0]

    async def until_resolved(self, alert: str, *, timeout_s: float = PATIENCE_S, **labels: str) -> None:
        """Wait until no alert with these labels fires."""
        wanted = {"alertname": alert, **labels}

        async def is_gone() -> bool:
            return not any(wanted.items() <= found.items() for found in await self.firing())

        await self.until(is_gone, f"still {wanted}", timeout_s)

    async def until(self, condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float) -> None:
        """Wait for a condition. Raises AssertionError that says what is missing, and what fires."""
        deadline_s = time.monotonic() + timeout_s
        while not await condition():
            assert time.monotonic() < deadline_s, f"{what} in {timeout_s} s; firing: {await self.firing()}"
            await asyncio.sleep(0.1)

    def _write_targets(self) -> None:
        found = [{"targets": [address], "labels": {"job": job}} for job, address in self._targets]
        part = self._targets_file.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(self._targets_file)


@asynccontextmanager
async def prometheus(
    folder: Path,
    *,
    factor: int = FACTOR,
    more_rules: Sequence[Path] = (),
    alertmanager: str | None = None,
    scrape_every: str = SCRAPE_EVERY,
    runs_dir: Path | None = None,
) -> AsyncIterator[Prometheus]:
    """A server with the deployed rules, time divided by `factor`.

    It scrapes what `Prometheus.watch` says, and by the deployed job the runs in `runs_dir`.
    """
    assert PROMETHEUS is not None
    folder.mkdir()  # noqa: ASYNC240 -- a moment
    address = free_address()
    running = Prometheus(folder, address)
    settings: dict[str, Any] = {
        "global": {"scrape_interval": scrape_every, "scrape_timeout": scrape_every, "evaluation_interval": "500ms"},
        "rule_files": [str(write_rules(folder, factor=factor, name=name)) for name in RULE_FILES],
        "scrape_configs": [
            {
                "job_name": "penstock",
                "file_sd_configs": [{"files": [str(running.targets_file)], "refresh_interval": "1s"}],
            }
        ],
    }
    settings["rule_files"] += map(str, more_rules)
    if runs_dir is not None:
        settings["scrape_configs"].append(_job_of_runs(runs_dir))
    if alertmanager is not None:
        settings["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(settings))
    command = [PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address={address}", "--rules.alert.resend-delay=1s", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 -- returns at once
    try:
        await running.until(lambda: running.query("targets"), "no answer of Prometheus", START_TIMEOUT_S)
        yield running
    finally:
        process.kill()
        process.wait()


def job_names() -> set[str]:
    """The jobs of the deployed configuration."""
    return {job["job_name"] for job in _jobs()}


def _job_of_runs(runs_dir: Path) -> dict[str, Any]:
    """The deployed job of runs that `penstock run` started, with this folder in place of the deployed one."""
    [job] = [job for job in _jobs() if job["job_name"] == "penstock-run"]
    [found] = job["file_sd_configs"]
    return job | {"file_sd_configs": [found | {"files": [str(runs_dir / Path(each).name) for each in found["files"]]}]}


def _jobs() -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    return jobs
