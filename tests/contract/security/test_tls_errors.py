"""TLS that fails says why, in one line at *error* with file, name and fix, and heals when the files are mended."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from penstock.errors import BadCertificateError, PenstockError, ServiceUnavailableError
from penstock.network.rpc import Server, call, call_with_retry, open_channel
from penstock.security import Security
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks import diagnosis, troubles
from penstock.security.checks.inspection import common_name
from penstock.security.checks.troubles import Troubles
from tests.helpers.certificates import issue, make_authority
from tests.helpers.serving import serving
from tests.helpers.waiting import until

DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def _looks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "RECHECK_S", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority")


@pytest.fixture
def good(authority: Path) -> Security:
    return issue(authority, name="good")


@pytest.fixture
def other(tmp_path: Path) -> Security:
    return issue(make_authority(tmp_path / "other"), name="other")


async def ask(target: str, security: Security) -> None:
    async with open_channel(target, security) as channel:
        method, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        await call(method, request, peer=f"broker {target}", timeout_s=30)


async def failure(target: str, security: Security) -> tuple[str, list[str]]:
    """What a call ends with, and what is logged at *error* meanwhile."""
    with capture_logs() as logs, pytest.raises(BadCertificateError) as failed:
        await ask(target, security)
    return str(failed.value), [
        entry["problem"] for entry in logs if (entry["log_level"], entry.get("peer")) == ("error", target)
    ]


Credentials = Callable[[Path, Security, Security], Security]
REFUSED: dict[str, tuple[Credentials, str]] = {
    "another authority": (
        lambda _folder, _good, other: other,
        r"signed by 'Penstock test', which .*ca.pem \(PENSTOCK_TLS_CA\) does not hold.*put the authority",
    ),
    "a certificate of another authority": (
        lambda _folder, good, other: replace(good, cert_file=other.cert_file, key_file=other.key_file),
        r"refuses this process's certificate: PENSTOCK_TLS_CERT: .*cert.pem was signed by .*use the authority's",
    ),
    "expired": (
        lambda folder, _good, _other: issue(folder, name="old", ago=2 * DAY, validity=DAY),
        r"PENSTOCK_TLS_CERT: .*old/cert.pem expired at .* UTC \(this machine's clock says .*\); issue it again",
    ),
    "not yet valid": (
        lambda folder, _good, _other: issue(folder, name="early", ago=-DAY),
        r"PENSTOCK_TLS_CERT: .*early/cert.pem is valid only from .* clock says .*, which may be wrong",
    ),
    "no certificate": (
        lambda _folder, good, _other: replace(good, cert_file=None, key_file=None),
        r"refuses clients without a certificate; set PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY",
    ),
    "plain text": (
        lambda _folder, _good, _other: Security(),
        r"speaks TLS, this process speaks plain text to it; set PENSTOCK_TLS_CA",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=list(REFUSED))
async def test_a_client_with_wrong_credentials_learns_why(
    authority: Path, good: Security, other: Security, make: Credentials, message: str
) -> None:
    async with serving(security=good) as (_, target):
        told, logged = await failure(target, make(authority, good, other))
        await ask(target, good)
    assert told.startswith(f"broker {target}: ")
    assert told == f"broker {target}: {logged[0]}"
    assert len(logged) == 1
    assert "\n" not in told
    assert re.search(message, told), told


SERVERS: dict[str, tuple[Credentials, str]] = {
    "expired": (
        lambda folder, _good, _other: issue(folder, name="old", ago=2 * DAY, validity=DAY),
        r"its certificate expired at .*clock says.*issue it again there",
    ),
    "not yet valid": (
        lambda folder, _good, _other: issue(folder, name="early", ago=-DAY),
        r"its certificate is valid only from .* which may be wrong",
    ),
    "plain text": (lambda _folder, _good, _other: Security(), r"speaks plain text, this process TLS; start it with"),
}


@pytest.mark.parametrize(("make", "message"), SERVERS.values(), ids=list(SERVERS))
async def test_a_server_whose_certificate_is_wrong_is_reported_by_its_clients(
    authority: Path, good: Security, other: Security, make: Credentials, message: str
) -> None:
    async with serving(security=make(authority, good, other)) as (_, target):
        told, logged = await failure(target, good)
    assert told.endswith(logged[0])
    assert re.search(message, told), told


async def test_a_name_that_does_not_fit_is_reported_with_those_that_would(good: Security) -> None:
    server = Server(listen="127.0.0.2:0", services=[], security=good)
    await server.start()
    try:
        told, _ = await failure(f"127.0.0.2:{server.port}", good)
    finally:
        await server.stop(grace_s=0.1)
    assert "does not name 127.0.0.2, but localhost, 127.0.0.1, ::1;" in told
    assert "penstock certs issue --host 127.0.0.2" in told


async def test_who_waits_goes_on_when_the_files_are_mended(authority: Path, good: Security) -> None:
    folder = authority.parent / "site"
    old = issue(authority, name="site", ago=2 * DAY, validity=DAY, out=folder)
    async with serving(security=good) as (_, target), open_channel(target, old) as channel:
        method, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        waiting = asyncio.create_task(call_with_retry(method, request, peer=f"broker {target}", give_up_after_s=30))
        with pytest.raises(BadCertificateError):
            await call(method, request, peer=f"broker {target}", timeout_s=30)
        issue(authority, name="site", out=folder)
        await waiting


async def test_a_server_that_is_away_has_no_trouble_with_tls(good: Security) -> None:
    async with serving(security=good) as (server, target):
        await server.stop(grace_s=0)
        with capture_logs() as logs, pytest.raises(ServiceUnavailableError) as failed:
            await ask(target, good)
    assert not isinstance(failed.value, BadCertificateError)
    assert not [entry for entry in logs if entry["log_level"] == "error"]


@pytest.fixture
async def dripping() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A peer that answers anything with the beginning of a TLS record, a byte now and then, for ever."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(1000))
        try:
            for byte in b"\x16\x03\x03\x40\x00" + b"\x02" * 10_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
        except (ConnectionError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", came


async def test_a_peer_that_drips_is_given_up_and_asked_by_one_thread_only(
    good: Security, dripping: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "MAX_S", 0.5)
    target, came = dripping
    known = Troubles()
    known.note_target(target, good.tls_files)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await asyncio.gather(*(known.trouble_with(f"broker {target}") for _ in range(50))) == [""] * 50
    ticking.cancel()
    assert ticks > 50, "the event loop stood still meanwhile"
    assert len(came) == 1
    # It hands over its answer a moment before it ends.
    await until(lambda: all(thread.name != "tls" for thread in threading.enumerate()))


def test_names_of_a_peer_that_lies_are_no_lines_of_their_own() -> None:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a\nlevel=error\x1b[31m")])
    assert common_name(name).count("\n") == 0
    assert common_name(name).isprintable()


async def test_what_was_never_called_is_not_asked() -> None:
    assert await Troubles().trouble_with("broker 127.0.0.1:1, or 10.0.0.1:2") == ""
    assert await Troubles().trouble_with_url("https://[::1/x", TlsFiles()) == ""


def test_a_bad_certificate_is_an_outage_and_no_refusal() -> None:
    error: PenstockError = BadCertificateError("x")
    assert error.is_retryable
