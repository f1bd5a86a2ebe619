"""What is wrong with a process's certificates is said in one line with file, name and fix; what is right is not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from structlog.testing import capture_logs

from penstock.security import Security
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks import watching
from penstock.security.checks.inspection import BACKDATED, covers, inspect
from penstock.security.checks.watching import CertificateWatch, hosts_of
from tests.helpers.certificates import issue, make_authority, make_security

DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority")


def only_ca(security: Security) -> TlsFiles:
    return TlsFiles(security.ca_file)


def test_what_is_right_is_not_worth_a_line(authority: Path) -> None:
    security = issue(authority, hosts=["gpu-1.example"])
    hosts = ["127.0.0.1", "localhost", "gpu-1.example", "GPU-1.example."]
    assert inspect(security.tls_files, hosts=hosts) == []
    assert inspect(only_ca(security)) == []
    assert inspect(TlsFiles()) == []


WRONG: dict[str, tuple[Callable[[Path], Security], bool, str]] = {
    "expired": (
        lambda folder: issue(folder, ago=2 * DAY, validity=DAY),
        True,
        r"expired at 2\d{3}-.* UTC \(this machine's clock says 2.* UTC\); issue it again \(penstock certs issue\)",
    ),
    "not yet valid": (
        lambda folder: issue(folder, ago=-DAY),
        True,
        r"is valid only from .* on \(this machine's clock says .* UTC, which may be wrong\); .*set the clock",
    ),
    "not renewed": (
        lambda folder: issue(folder, ago=9 * DAY, validity=12 * DAY),
        False,
        r"expires at .* UTC and has not been renewed yet; issue it again",
    ),
    "a name it lacks": (
        lambda folder: issue(folder, hosts=["b.example"]),
        True,
        r"does not name a.example, where other machines ask, but b.example, .*certs issue --host a.example",
    ),
}


@pytest.mark.parametrize(("make", "is_error", "message"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_reported_with_file_name_and_fix(
    authority: Path, make: Callable[[Path], Security], is_error: bool, message: str
) -> None:
    security = make(authority)
    hosts = ["a.example"] if "a.example" in message else []
    (finding,) = inspect(security.tls_files, hosts=hosts)
    assert finding.is_error == is_error
    assert finding.text.startswith(f"PENSTOCK_TLS_CERT: {security.cert_file} ")
    assert re.search(message, finding.text), finding.text
    assert "\n" not in finding.text


def test_an_authority_that_did_not_sign_and_one_that_expired(authority: Path, tmp_path: Path) -> None:
    security, other = issue(authority), issue(make_authority(tmp_path / "other"))
    mixed = replace(security, ca_file=other.ca_file)
    (finding,) = inspect(mixed.tls_files)
    assert f"was signed by 'Penstock test', which {other.ca_file} (PENSTOCK_TLS_CA) does not hold" in finding.text
    later = datetime.now(UTC) + 20 * 365 * DAY
    texts = [one.text for one in inspect(only_ca(security), now=later)]
    assert len(texts) == 1
    assert texts[0].startswith(f"PENSTOCK_TLS_CA: the authority 'Penstock test' in {security.ca_file} expired at ")


def test_both_usages_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usages = x509.ExtendedKeyUsage
    monkeypatch.setattr(x509, "ExtendedKeyUsage", lambda _asked: usages([ExtendedKeyUsageOID.CLIENT_AUTH]))
    security = make_security(tmp_path)
    monkeypatch.undo()
    (finding,) = inspect(security.tls_files)
    assert finding.is_error
    assert "lacks the extended key usage serverAuth" in finding.text


def test_the_backdating_of_our_own_certificates_is_no_time_of_theirs(authority: Path) -> None:
    hour = timedelta(hours=1)
    security = issue(authority, validity=hour)
    now = datetime.now(UTC)
    assert inspect(security.tls_files, now=now + hour * 2 / 3 - BACKDATED) == []
    (finding,) = inspect(security.tls_files, now=now + hour * 2 / 3 + timedelta(seconds=2))
    assert "has not been renewed yet" in finding.text


def test_a_wildcard_covers_one_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = x509.SubjectAlternativeName
    monkeypatch.setattr(x509, "SubjectAlternativeName", lambda _names: names([x509.DNSName("*.example")]))
    security = make_security(tmp_path)
    monkeypatch.undo()
    assert security.cert_file is not None
    certificate = x509.load_pem_x509_certificate(security.cert_file.read_bytes())
    assert covers(certificate, "a.example")
    assert not covers(certificate, "a.b.example")
    assert not covers(certificate, "example")
    assert not covers(certificate, "127.0.0.1")


def test_an_ipv4_address_in_ipv6_form_is_not_covered_as_clients_refuse_it(authority: Path) -> None:
    security = issue(authority, hosts=["10.0.0.1"])
    assert security.cert_file is not None
    certificate = x509.load_pem_x509_certificate(security.cert_file.read_bytes())
    assert covers(certificate, "10.0.0.1")
    assert not covers(certificate, "::ffff:10.0.0.1")
    findings = inspect(security.tls_files, hosts=["10.0.0.1", "::ffff:10.0.0.1"])
    assert [finding.what for finding in findings] == ["name ::ffff:10.0.0.1"]


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [("0.0.0.0:1", ["127.0.0.1"]), ("[::]:1", ["127.0.0.1"]), ("127.0.0.1:1", ["127.0.0.1"]), ("10.0.0.1:1", [])],
)
def test_health_checks_ask_at_loopback(listen: str, hosts: list[str]) -> None:
    assert hosts_of(listen) == hosts


async def test_it_is_said_at_once_again_after_a_while_and_again_when_it_is_back(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = authority.parent / "site"
    security = issue(authority, ago=2 * DAY, validity=DAY, out=folder)
    watch = CertificateWatch(security.tls_files, hosts=[])
    with capture_logs() as logs:
        watch.look()
        watch.look()
        assert [entry["log_level"] for entry in logs] == ["error"]
        monkeypatch.setattr(watching, "SAY_AGAIN_S", 0.0)
        watch.look()
        assert len(logs) == 2
        monkeypatch.undo()
        issue(authority, out=folder)
        assert watch.look() == []
        issue(authority, ago=2 * DAY, validity=DAY, out=folder)
        watch.look()
    assert len(logs) == 3


async def test_a_watch_looks_as_long_as_it_runs(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.0)
    folder = authority.parent / "site"
    security = issue(authority, out=folder)
    with capture_logs() as logs:
        running = asyncio.create_task(CertificateWatch(security.tls_files, hosts=[]).run())
        await asyncio.sleep(0)
        issue(authority, ago=2 * DAY, validity=DAY, out=folder)
        async with asyncio.timeout(10):
            while not logs:  # noqa: ASYNC110 -- a line of a log is no event
                await asyncio.sleep(0)
    running.cancel()
    assert "expired at" in logs[0]["problem"]
