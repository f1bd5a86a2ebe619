"""Certificates that fail are told by the checks before a run, by probes, by health checks, and by `penstock status`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from rich.console import Console

from console.config.config import RunConfig
from console.inspect.certificates import certificate_findings, certificate_lines
from console.inspect.find_run import Target
from console.inspect.status import Picture, as_document, render, status_command
from console.launch.probes import service_problem
from penstock import healthcheck
from penstock.clock import SystemClock
from penstock.network.rpc import Server
from penstock.process.busy_time import BusyTracker
from penstock.security import NO_SECURITY, Security
from penstock.v1 import broker_pb2, trainer_pb2
from services.broker.storage.memory_store import MemoryStore
from services.generator.decoding.lease_handler import GeneratorLeaseHandler
from services.generator.decoding.token_rate import TokenRate
from tests.helpers.brokers.broker import RUN, Generator, error_of, eventually
from tests.helpers.brokers.broker import serving as serving_broker
from tests.helpers.certificates import issue, make_authority, make_security
from tests.helpers.serving import serving

pytestmark = pytest.mark.slow

DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority")


@asynccontextmanager
async def elsewhere(security: Security) -> AsyncIterator[str]:
    """A server under an address that certificates do not name unless asked to."""
    server = Server(listen="127.0.0.2:0", services=[], security=security)
    await server.start()
    try:
        yield f"127.0.0.2:{server.port}"
    finally:
        await server.stop(grace_s=0.1)


def run_config(**changes: object) -> RunConfig:
    document = {"run": {"id": "r"}, "model": {"path": "m"}, "data": {"train": "t"}, "reward": {"model": "numeric"}}
    return RunConfig.model_validate(document | changes)


async def test_a_probe_says_why_tls_fails(authority: Path) -> None:
    security = issue(authority)
    async with elsewhere(security) as target:
        problem = await service_problem(target, "broker", security=security)
    assert problem is not None
    assert problem.startswith(f"TLS with {target} fails: its certificate does not name 127.0.0.2, but localhost")


async def test_a_failed_health_check_says_why(
    authority: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    security = issue(authority)
    for name, path in zip(("CA", "CERT", "KEY"), security.tls_files.paths, strict=True):
        monkeypatch.setenv(f"PENSTOCK_TLS_{name}", str(path))
    async with elsewhere(security) as target:
        monkeypatch.setattr(sys, "argv", ["healthcheck", target])
        assert await asyncio.to_thread(healthcheck.main) == 1
    assert "does not name 127.0.0.2" in capsys.readouterr().err


async def test_status_names_servers_whose_certificates_end(authority: Path) -> None:
    own = issue(authority, name="own")
    late = issue(authority, name="late", ago=9 * DAY, validity=12 * DAY)
    old = issue(authority, name="old", ago=2 * DAY, validity=DAY)
    async with (
        serving(security=own) as (_, broker),
        serving(security=late) as (_, trainer),
        serving(security=old) as (
            _,
            scheduler,
        ),
    ):
        target = Target(run_id="r", broker=broker, folder=None, scheduler=scheduler, trainer=trainer)
        lines = await certificate_lines(target, own)
        own_lines = await certificate_lines(Target(run_id="r", broker=broker, folder=None), late)
    assert len(lines) == 2
    assert lines[0].startswith(f"TLS with scheduler {scheduler} fails: its certificate expired at ")
    assert lines[1].startswith(f"certificate of trainer {trainer} expires at ")
    assert own_lines[0].startswith(f"PENSTOCK_TLS_CERT: {late.cert_file} expires at ")
    assert await certificate_lines(target, NO_SECURITY) == []


def test_a_run_is_not_begun_with_certificates_that_its_services_cannot_use(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert certificate_findings(run_config(), issue(authority)) == []
    assert certificate_findings(run_config(), NO_SECURITY) == []
    names = x509.SubjectAlternativeName
    monkeypatch.setattr(x509, "SubjectAlternativeName", lambda _names: names([x509.DNSName("trainer.example")]))
    security = make_security(tmp_path)
    monkeypatch.undo()
    (finding,) = certificate_findings(run_config(), security)
    assert finding.is_error
    assert "does not name 127.0.0.1, where health checks and services of this machine ask" in finding.text
    public = run_config(listen={"public_host": "gpu.example"})
    assert [one.what for one in certificate_findings(public, security)] == ["name 127.0.0.1", "name gpu.example"]
    expired = issue(authority, ago=2 * DAY, validity=DAY)
    assert [one.is_error for one in certificate_findings(run_config(), expired)] == [True]


def test_status_tells_what_the_trainer_warns_of() -> None:
    picture = Picture(
        target=Target(run_id="r", broker="b:1", folder=None, trainer="t:1"),
        now_s=0.0,
        run=None,
        problem="away",
        problem_for_s=0.0,
        processes=(),
        trainer=trainer_pb2.GetTrainerResponse(run_id="r", warnings=["weights of gen-1: why"]),
        certificates=["certificate of broker b:1 expires soon"],
    )
    with StringIO() as out:
        Console(file=out, width=200).print(render(picture))
        lines = out.getvalue().splitlines()
    assert "warning of the trainer: weights of gen-1: why" in [line.strip() for line in lines]
    assert "certificate of broker b:1 expires soon" in [line.strip() for line in lines]
    document = as_document(picture)
    assert document["trainer"]["warnings"] == ["weights of gen-1: why"]
    assert document["certificates"] == ["certificate of broker b:1 expires soon"]


async def test_status_tells_what_is_wrong_with_a_generators_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving_broker(MemoryStore(SystemClock())) as broker:
        await broker.open()
        generator = Generator.connect(broker.channel)
        generator.beat(warning="PENSTOCK_TLS_CERT: c.pem expired\nforged")
        target = f"127.0.0.1:{broker.server.port}"

        async def is_told() -> bool:
            run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
            return bool(run.generators and run.generators[0].beat.warning)

        await eventually(is_told)
        await asyncio.to_thread(
            status_command, RUN, broker=target, runs_dir=Path("runs"), is_watched=False, as_json=False
        )
        generator.beat(warning="x" * 1025)
        assert (await error_of(generator.stream)).reason == "INVALID_FIELD"
    assert "PENSTOCK_TLS_CERT: c.pem expired?forged" in capsys.readouterr().out


def test_a_generator_reports_it_in_its_heartbeats() -> None:
    stats = SimpleNamespace(num_running=0, num_waiting=0, kv_cache_usage=0.0, tokens_generated=0)
    holder = GeneratorLeaseHandler(
        engine=SimpleNamespace(stats=lambda: stats),  # type: ignore[arg-type]
        rollouts=SimpleNamespace(lease_ids=[], refused_chunks={}),  # type: ignore[arg-type]
        held=SimpleNamespace(current=None),  # type: ignore[arg-type]
        busy=BusyTracker(SystemClock()),
        rate=TokenRate(),
        on_owner=lambda _owner: None,
    )
    assert holder.beat().warning == ""
    holder.warning = lambda: "c.pem expired" + 2000 * "!"
    assert holder.beat().warning == "c.pem expired" + 1011 * "!"
