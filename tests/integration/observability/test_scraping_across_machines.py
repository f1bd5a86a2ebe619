"""Metrics of other machines by mutual TLS and tokens: a real Prometheus as an agent, and the one that it sends to."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.config.run_folder import RunFolder
from console.launch.metrics_targets import MetricsTargets, run_targets
from penstock.network.metrics_server import serve_metrics
from penstock.security import Security
from tests.helpers.certificates import issue, make_authority
from tests.helpers.observability.compressed_rules import FOLDER
from tests.helpers.observability.prometheus import PATIENCE_S, PROMETHEUS, needs_prometheus
from tests.helpers.ports import free_address, free_port
from tests.integration.observability.test_alerts import needs_promtool, promtool

pytestmark = [needs_prometheus, pytest.mark.grid, pytest.mark.slow, pytest.mark.timeout(900)]
UP_HERE = {"math-7b/broker": 1.0, "math-7b/trainer": 1.0}


@needs_promtool
async def test_an_agent_reads_loopback_by_its_certificate_and_sends_on_by_mutual_tls(tmp_path: Path) -> None:
    observer = issue(make_authority(tmp_path / "authority"), roles=("observer",), name="prometheus")
    of_services = issue(tmp_path / "authority", name="services")
    address = free_address()
    agent = _agent(tmp_path, _runs_with_services(tmp_path, of_services), observer, f"https://{address}")
    async with AsyncExitStack() as stack:
        center = await stack.enter_async_context(_receiver(tmp_path, address, observer))
        promtool("check", "config", "--agent", agent)
        promtool("check", "web-config", tmp_path / "web.yml")
        await stack.enter_async_context(_process(tmp_path / "agent", agent, "--enable-feature=agent"))
        await _until(lambda: center(observer), UP_HERE)
        with pytest.raises(OSError, match=r"bad certificate|certificate required"):
            await center(Security(ca_file=observer.ca_file))


async def test_a_certificate_of_another_role_reads_no_metrics(tmp_path: Path) -> None:
    generator = issue(make_authority(tmp_path / "authority"), roles=("generator",), name="gpu-0")
    await _tell_who_is_up(tmp_path, issue(tmp_path / "authority", name="services"), generator, is_read=False)


@pytest.mark.parametrize(("role", "is_read"), [("observer", True), ("generator", False)])
async def test_a_token_opens_the_metrics_to_an_observer_alone(role: str, is_read: bool, tmp_path: Path) -> None:
    token = f"{role}:{'s' * 16}"
    of_services = replace(issue(make_authority(tmp_path / "authority"), name="services"), accepted_tokens=(token,))
    await _tell_who_is_up(tmp_path, of_services, Security(ca_file=of_services.ca_file), token=token, is_read=is_read)


async def _tell_who_is_up(
    folder: Path, of_services: Security, of_agent: Security, *, is_read: bool, token: str | None = None
) -> None:
    """Wait until an agent with these credentials has told a receiver that all services are up, or none."""
    address = free_address()
    agent = _agent(folder, _runs_with_services(folder, of_services), of_agent, f"http://{address}", token=token)
    async with AsyncExitStack() as stack:
        center = await stack.enter_async_context(_receiver(folder, address, None))
        await stack.enter_async_context(_process(folder / "agent", agent, "--enable-feature=agent"))
        await _until(lambda: center(None), UP_HERE if is_read else dict.fromkeys(UP_HERE, 0.0))


def _runs_with_services(folder: Path, security: Security) -> Path:
    """Metrics of two services on loopback, in the file beside the folder of their run; the folder of runs."""
    run = RunFolder(folder / "runs" / "math-7b")
    run.create()
    targets = MetricsTargets(run, run_targets(run))
    for kind in ("broker", "trainer"):
        address = targets.address_of(kind)
        serve_metrics(address, security)
        targets.add(kind, kind, address, serves_tls=True)
    return run.path.parent


def _agent(folder: Path, runs: Path, security: Security, center: str, *, token: str | None = None) -> Path:
    """The deployed configuration of an agent with the places of the test, and the token where its comment says."""
    text = (FOLDER / "machine.yml").read_text().replace("https://metrics.example.org:9090", center)
    text = _placed(text, security).replace("/runs/", f"{runs}/").replace("15s", "1s")
    if token is not None:
        (folder / "token").write_text(token)
        authorization = f"    authorization: {{credentials_file: {folder / 'token'}}}\n"
        text = text.replace("    tls_config:", f"{authorization}    tls_config:", 1)
    path = folder / "machine.yml"
    path.write_text(text)
    return path


def _placed(text: str, security: Security) -> str:
    """A configuration with the files of these credentials; without a certificate, with the authority alone."""
    for name, path in (("ca", security.ca_file), ("cert", security.cert_file), ("key", security.key_file)):
        text = text.replace(f"/etc/penstock-observer/{name}.pem", str(path))
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(": None\n"))


Asks = Callable[[Security | None], Awaitable[dict[str, float]]]


@asynccontextmanager
async def _receiver(folder: Path, address: str, security: Security | None) -> AsyncIterator[Asks]:
    """A Prometheus that agents send to, by the deployed TLS with `security`; gives what asks it who is up."""
    settings = folder / "center.yml"
    settings.write_text("global: {}\n")
    options = ["--web.enable-remote-write-receiver", f"--web.listen-address={address}"]
    if security is not None:
        web = folder / "web.yml"
        web.write_text(_placed((FOLDER / "web.yml").read_text(), security))
        options.append(f"--web.config.file={web}")

    async def ask(of: Security | None) -> dict[str, float]:
        return await asyncio.to_thread(_up, f"http{'s' if of else ''}://{address}", of)

    async with _process(folder / "center", settings, *options):
        yield ask


def _up(base: str, security: Security | None) -> dict[str, float]:
    """Who is up, by instance. Raises OSError without an answer."""
    context = None
    if security is not None:
        context = ssl.create_default_context(cafile=str(security.ca_file))
        if security.cert_file is not None:
            context.load_cert_chain(security.cert_file, security.key_file)
    query = urllib.parse.urlencode({"query": 'up{job=~"penstock-.*"}'})
    with urllib.request.urlopen(f"{base}/api/v1/query?{query}", timeout=30, context=context) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return {each["metric"]["instance"]: float(each["value"][1]) for each in found}


@asynccontextmanager
async def _process(folder: Path, settings: Path, *options: str) -> AsyncIterator[None]:
    """A Prometheus with its data in `folder`; an agent at any port."""
    assert PROMETHEUS is not None
    folder.mkdir()  # noqa: ASYNC240 -- a moment
    is_agent = "--enable-feature=agent" in options
    own = [f"--storage.{'agent' if is_agent else 'tsdb'}.path={folder}", f"--config.file={settings}", *options]
    own += [f"--web.listen-address=127.0.0.1:{free_port()}"] if is_agent else []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROMETHEUS, *own], stdout=log, stderr=log)  # noqa: ASYNC220 -- returns at once
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _until(ask: Callable[[], Awaitable[dict[str, float]]], expected: dict[str, float]) -> None:
    """Wait until exactly these are known. Raises AssertionError that says what is."""
    deadline_s = time.monotonic() + PATIENCE_S
    found: dict[str, float] = {}
    while found != expected:
        assert time.monotonic() < deadline_s, f"not {expected}: {found}"
        # It starts first.
        with suppress(OSError):
            found = await ask()
        await asyncio.sleep(0.2)
