"""Keeps a certificate authority, a key and a certificate in a folder, and signs certificates with it.

Certificates are valid from five minutes before they are made, so that machines whose clocks are slightly behind accept
them at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from console.certs.atomic_files import File, named_errors, write_new
from console.certs.request import Request, as_address
from penstock.config import ConfigError
from penstock.process.durable_files import sync_folder
from penstock.security.roles import role_uri

CERTIFICATE_FILE, KEY_FILE = "ca.pem", "ca-key.pem"
PUBLIC, PRIVATE = 0o644, 0o600
CLOCK_TOLERANCE = timedelta(minutes=5)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names in every certificate: health checks reach a service on its own machine."""
MAX_AUTHORITY_DAYS = 36500


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates; its private key can impersonate any holder."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Load the authority in a folder. Raises ConfigError."""
        certificate, path = read_certificate(folder), folder / KEY_FILE
        if not os.path.lexists(path):
            raise ConfigError(
                f"{folder}: holds no {KEY_FILE}, so it is not an authority's folder; name that with --dir"
            )
        try:
            with named_errors(path, "read"):
                key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: holds no private key in PEM without a password; put the key back") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{path}: is not the key of {folder / CERTIFICATE_FILE}; restore the right one")
        return cls(folder, certificate, key)

    def sign(self, request: Request, *, validity: timedelta, now: datetime) -> Signed:
        """Issue a certificate with a new key. Raises ConfigError if it would outlive the authority."""
        end, own_end = _whole(now) + validity, self.certificate.not_valid_after_utc
        if end > own_end:
            raise ConfigError(
                f"{self.folder / CERTIFICATE_FILE}: the authority itself ends on {own_end:%Y-%m-%d %H:%M} UTC; ask for "
                "less with --days or --valid, or make another authority with: penstock certs init"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_named(request.name), self.certificate.subject, key, start=now, end=end)
            .add_extension(_alternative_names(request), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return Signed(builder.sign(self.key, hashes.SHA256()), key)


def make_authority(folder: Path, *, name: str, days: int, now: datetime) -> Authority:
    """Make an authority in a folder that has none. Raises ConfigError."""
    if not (name.isprintable() and 1 <= len(name) <= 64):
        raise ConfigError(f"--name {name[:80]!r}: must be 1 to 64 printable characters")
    if not 1 <= days <= MAX_AUTHORITY_DAYS:
        raise ConfigError(f"--days {days}: must be 1 to {MAX_AUTHORITY_DAYS}")
    with named_errors(folder, "made"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_another(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_named(name), _named(name), key, start=now, end=_whole(now) + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_new(folder, File(KEY_FILE, key_pem(key), PRIVATE))
    try:
        write_new(folder, File(CERTIFICATE_FILE, certificate_pem(certificate), PUBLIC))
        if not (folder / ".gitignore").exists():
            write_new(folder, File(".gitignore", b"# Keys are no part of a repository.\n*\n", PUBLIC))
    except ConfigError:
        for name_made in (CERTIFICATE_FILE, KEY_FILE):
            (folder / name_made).unlink(missing_ok=True)
        raise
    with named_errors(folder, "written"):
        sync_folder(folder)
    return Authority(folder, certificate, key)


def read_certificate(folder: Path) -> x509.Certificate:
    """Load the certificate of the authority in a folder. Raises ConfigError."""
    path = folder / CERTIFICATE_FILE
    try:
        with named_errors(path, "read"):
            return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: holds no certificate in PEM; put the authority's back") from error
    except ConfigError as error:
        if path.exists():
            raise
        raise ConfigError(f"{folder}: no authority here; make one with: penstock certs init {folder}") from error


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """The certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _refuse_another(folder: Path) -> None:
    found = [name for name in (CERTIFICATE_FILE, KEY_FILE) if os.path.lexists(folder / name)]
    if len(found) == 2:
        raise ConfigError(
            f"{folder}: already holds an authority, which others trust; issue from it with penstock certs issue "
            f"--dir {folder}, or name another folder"
        )
    if found:
        raise ConfigError(f"{folder}: holds {found[0]} of an authority and not the rest; name another folder")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_whole(start) - CLOCK_TOLERANCE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _alternative_names(request: Request) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*request.hosts, *LOOPBACK)):
        address = as_address(host)
        names.append(x509.DNSName(host) if address is None else x509.IPAddress(address))
    uris = (role_uri(role, run_id=request.run, site=request.site) for role in request.roles)
    names += [x509.UniformResourceIdentifier(uri) for uri in uris]
    return x509.SubjectAlternativeName(names)


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _whole(moment: datetime) -> datetime:
    """Certificates store whole seconds."""
    return moment.astimezone(UTC).replace(microsecond=0)
