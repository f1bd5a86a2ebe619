"""Certificates of an authority: what they say, who takes them and who does not."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import stat
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from console.certs.atomic_files import File, write_new
from console.certs.authority import Authority, make_authority
from console.certs.request import Request, checked_request
from penstock.clients.broker import BrokerClient
from penstock.config import ConfigError
from penstock.errors import ForbiddenError
from penstock.network.rpc import open_channel
from penstock.security import Security
from penstock.security.roles import Caller, Grant, Role, caller_of_certificate
from tests.helpers import certificates
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.serving import serving

NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
HOUR = timedelta(hours=1)


def request(*, hosts: tuple[str, ...] = (), roles: tuple[str, ...] = ("generator",)) -> Request:
    return checked_request(roles, run="math-7b", site="waw", name="waw-0", hosts=hosts)


def made(folder: Path, *, days: int = 10) -> Authority:
    return make_authority(folder, name="Penstock", days=days, now=NOW)


def extension(certificate: x509.Certificate, kind: type[Any]) -> Any:
    return certificate.extensions.get_extension_for_class(kind)


def test_a_certificate_says_who_its_holder_is_and_where(tmp_path: Path) -> None:
    wanted = request(hosts=("gpu-1.Example.org", "10.0.0.7", "fd00::7"), roles=("generator", "environment"))
    certificate = made(tmp_path).sign(wanted, validity=HOUR, now=NOW).certificate
    names = extension(certificate, x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gpu-1.example.org", "localhost"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["10.0.0.7", "fd00::7", "127.0.0.1", "::1"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "penstock://math-7b/generator/waw",
        "penstock://math-7b/environment/waw",
    ]
    assert [(name.oid, name.value) for name in certificate.subject] == [(NameOID.COMMON_NAME, "waw-0")]
    usages = extension(certificate, x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_a_service_reads_from_it_who_calls(tmp_path: Path) -> None:
    wanted = request(roles=("generator", "environment"))
    certificate = made(tmp_path).sign(wanted, validity=HOUR, now=NOW).certificate
    names = extension(certificate, x509.SubjectAlternativeName).value
    caller = caller_of_certificate(names.get_values_for_type(x509.UniformResourceIdentifier), "waw-0")
    roles = (Role.ACCESS_ROLE_GENERATOR, Role.ACCESS_ROLE_ENVIRONMENT)
    assert caller == Caller(grants=[Grant(role, "math-7b", "waw") for role in roles], name="waw-0")


def test_it_is_valid_from_five_minutes_before_for_as_long_as_was_asked(tmp_path: Path) -> None:
    authority = made(tmp_path)
    certificate = authority.sign(request(), validity=timedelta(minutes=1), now=NOW).certificate
    assert certificate.not_valid_before_utc == datetime(2026, 3, 1, 11, 55, tzinfo=UTC)
    assert certificate.not_valid_after_utc == datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    # A machine whose clock is behind has to take the authority too.
    assert authority.certificate.not_valid_before_utc == datetime(2026, 3, 1, 11, 55, tzinfo=UTC)


def test_it_signs_nothing_itself_and_the_authority_nothing_but_such(tmp_path: Path) -> None:
    authority = made(tmp_path)
    certificate = authority.sign(request(), validity=HOUR, now=NOW).certificate
    own, its = (extension(item, x509.BasicConstraints) for item in (authority.certificate, certificate))
    assert (own.critical, own.value.ca, own.value.path_length) == (True, True, 0)
    assert (its.critical, its.value.ca) == (True, False)
    assert not extension(certificate, x509.KeyUsage).value.key_cert_sign
    assert not extension(authority.certificate, x509.KeyUsage).value.digital_signature


@pytest.mark.parametrize("host", ["gpu-1.example.org", "localhost", "10.0.0.7", "127.0.0.1", "::1"])
def test_a_strict_verifier_takes_it_for_server_and_client(tmp_path: Path, host: str) -> None:
    authority = made(tmp_path)
    wanted = request(hosts=("gpu-1.example.org", "10.0.0.7"))
    certificate = authority.sign(wanted, validity=HOUR, now=NOW).certificate
    subject = x509.DNSName(host) if host[-1].isalpha() else x509.IPAddress(ipaddress.ip_address(host))
    policy = verification.PolicyBuilder().store(verification.Store([authority.certificate]))
    builder, later = policy.time(NOW), policy.time(NOW + 2 * HOUR)
    assert builder.build_server_verifier(subject).verify(certificate, []) == [certificate, authority.certificate]
    assert builder.build_client_verifier().verify(certificate, []).chain == [certificate, authority.certificate]
    with pytest.raises(verification.VerificationError):
        later.build_client_verifier().verify(certificate, [])


def test_each_certificate_has_a_key_and_a_serial_number_of_its_own(tmp_path: Path) -> None:
    signed = [made(tmp_path).sign(request(), validity=HOUR, now=NOW)]
    signed.append(Authority.load(tmp_path).sign(request(), validity=HOUR, now=NOW))
    assert signed[0].key.public_key() != signed[1].key.public_key()
    assert signed[0].certificate.serial_number != signed[1].certificate.serial_number
    assert all(isinstance(item.key.curve, ec.SECP256R1) for item in signed)


def test_only_its_owner_reads_an_authoritys_key(tmp_path: Path) -> None:
    made(tmp_path / "authority")
    assert stat.S_IMODE((tmp_path / "authority").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "authority/ca-key.pem").stat().st_mode) == 0o600
    assert (tmp_path / "authority/.gitignore").read_text().splitlines()[-1] == "*"


@pytest.mark.parametrize("lost", ["", "ca.pem", "ca-key.pem"])
def test_an_authority_is_never_written_over(tmp_path: Path, lost: str) -> None:
    made(tmp_path)
    if lost:
        (tmp_path / lost).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="name another folder"):
        made(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_authority_that_could_not_be_written_leaves_no_half_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, file: File) -> None:
        if file.name == "ca.pem":
            raise ConfigError("the disk is full")
        write_new(folder, file)

    monkeypatch.setattr("console.certs.authority.write_new", write)
    with pytest.raises(ConfigError, match="the disk is full"):
        made(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    made(tmp_path)


def test_a_certificate_does_not_outlive_its_authority(tmp_path: Path) -> None:
    authority = made(tmp_path, days=10)
    authority.sign(request(), validity=timedelta(days=10), now=NOW)
    with pytest.raises(ConfigError, match=r"ca\.pem: the authority itself ends on 2026-03-11 12:00 UTC; ask for less"):
        authority.sign(request(), validity=timedelta(days=10, seconds=1), now=NOW)


def another_key(folder: Path) -> None:
    made(folder / "other")
    (folder / "other/ca-key.pem").rename(folder / "ca-key.pem")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "ca.pem").unlink(), "no authority here; make one with: penstock certs init"),
        (lambda folder: (folder / "ca.pem").write_text("nothing"), r"ca\.pem: holds no certificate in PEM"),
        (lambda folder: (folder / "ca-key.pem").unlink(), "it is not an authority's folder"),
        (lambda folder: (folder / "ca-key.pem").write_text("nothing"), r"ca-key\.pem: holds no private key"),
        (another_key, r"ca-key\.pem: is not the key of .*ca\.pem"),
    ],
)
def test_a_folder_that_is_no_authoritys_is_refused(tmp_path: Path, spoil: Any, words: str) -> None:
    made(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=words) as raised:
        Authority.load(tmp_path)
    assert "\n" not in str(raised.value)


def handshake(server: Security, client: Security, *, host: str = "127.0.0.1") -> list[Any]:
    """What the server and then the client made of the other: its URI names, or the error."""
    listening, calling = (ssl.create_default_context(side, cafile=ca) for side, ca in _sides(server, client))
    listening.verify_mode = ssl.CERT_REQUIRED
    for context, security in ((listening, server), (calling, client)):
        assert security.cert_file is not None
        context.load_cert_chain(security.cert_file, security.key_file)
    views: list[Any] = []

    def shake(context: ssl.SSLContext, connection: socket.socket, **how: Any) -> None:
        try:
            with context.wrap_socket(connection, **how) as wrapped:
                names = wrapped.getpeercert()["subjectAltName"]  # type: ignore[index]
                wrapped.sendall(b".")
                wrapped.recv(1)
                views.append([value for kind, value in names if kind == "URI"])
        except (ssl.SSLError, OSError) as error:
            views.append(error)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(socket.create_connection(listener.getsockname(), timeout=20)) as connection,
    ):
        accepted = listener.accept()[0]
        accepted.settimeout(20)
        thread = threading.Thread(target=shake, args=(listening, accepted), kwargs={"server_side": True})
        thread.start()
        shake(calling, connection, server_hostname=host)
        thread.join()
    return views


def _sides(server: Security, client: Security) -> Any:
    return (ssl.Purpose.CLIENT_AUTH, server.ca_file), (ssl.Purpose.SERVER_AUTH, client.ca_file)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "trainer.example.org"])
def test_each_side_of_a_connection_takes_the_others_certificate(tmp_path: Path, host: str) -> None:
    folder = certificates.make_authority(tmp_path)
    trainer = certificates.issue(folder, roles=["trainer"], run="r1", name="trainer", hosts=["trainer.example.org"])
    generator = certificates.issue(folder, roles=["generator"], run="r1", site="waw", name="waw-0")
    views = handshake(trainer, generator, host=host)
    assert sorted(views) == [["penstock://r1/generator/waw"], ["penstock://r1/trainer/*"]]
    assert all(isinstance(view, list) for view in handshake(generator, trainer))


def test_a_certificate_of_another_authority_is_taken_by_neither_side(tmp_path: Path) -> None:
    own, other = (certificates.issue(certificates.make_authority(tmp_path / name)) for name in ("own", "other"))
    stranger = Security(ca_file=own.ca_file, cert_file=other.cert_file, key_file=other.key_file)
    for views in (handshake(own, stranger), handshake(stranger, own)):
        assert any(isinstance(view, ssl.SSLCertVerificationError) for view in views), views


@pytest.mark.parametrize(
    ("ago", "host", "words"),
    [
        (2 * HOUR, "127.0.0.1", "certificate has expired"),
        (-HOUR, "127.0.0.1", "not yet valid"),
        (timedelta(0), "gpu-1.example.org", "Hostname mismatch"),
    ],
)
def test_one_that_does_not_fit_is_refused(tmp_path: Path, ago: timedelta, host: str, words: str) -> None:
    folder = certificates.make_authority(tmp_path)
    server = certificates.issue(folder, name="server", validity=HOUR, ago=ago)
    views = handshake(server, certificates.issue(folder, name="client"), host=host)
    assert any(isinstance(view, ssl.SSLCertVerificationError) and words in str(view) for view in views), views


async def test_grpc_takes_it_both_ways(tmp_path: Path) -> None:
    folder = certificates.make_authority(tmp_path)
    broker = certificates.issue(folder, roles=["broker"], name="broker")
    operator = certificates.issue(folder, name="anna")
    async with serving(security=broker) as (_, target), open_channel(target, operator) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_grpc_tells_a_service_the_role_that_it_names(tmp_path: Path) -> None:
    folder = certificates.make_authority(tmp_path)
    broker = certificates.issue(folder, roles=["broker"], name="broker")
    generator = certificates.issue(folder, roles=["generator"], run="math-7b", site="waw", name="waw-0")
    async with (
        serving(ScriptedTrainingBroker().service(), security=broker) as (_, target),
        BrokerClient(target, security=generator) as client,
    ):
        with pytest.raises(ForbiddenError, match="is not open to waw-0, generator of run math-7b at site waw"):
            await client.list_runs()


def test_keys_are_plain_pem(tmp_path: Path) -> None:
    security = certificates.issue(certificates.make_authority(tmp_path))
    assert security.cert_file is not None
    assert security.key_file is not None
    key = serialization.load_pem_private_key(security.key_file.read_bytes(), password=None)
    certificate = x509.load_pem_x509_certificate(security.cert_file.read_bytes())
    assert key.public_key() == certificate.public_key()
