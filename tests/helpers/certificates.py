"""Certificates for tests: an authority that signs certificates with roles, and one that is its own authority."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from console.certs import authority, issuing
from console.certs.request import DEFAULT_VALIDITY, checked_request
from penstock.security import Security


def make_authority(folder: Path) -> Path:
    """Make an authority in `folder`, as `penstock certs init` does; returns the folder, for `issue`."""
    now = datetime.datetime.now(datetime.UTC)
    return authority.make_authority(folder, name="Penstock test", days=3650, now=now).folder


def issue(
    folder: Path,
    *,
    roles: Sequence[str] = ("operator",),
    run: str = "*",
    site: str = "*",
    name: str = "test",
    hosts: Sequence[str] = (),
    validity: datetime.timedelta = DEFAULT_VALIDITY,
    ago: datetime.timedelta = datetime.timedelta(0),
    out: Path | None = None,
    token: str | None = None,
) -> Security:
    """Issue a certificate of the authority in `folder`, as `penstock certs issue` does; returns what its holder has.

    Its files (ca.pem, cert.pem, key.pem, env) lie in `out`, or FOLDER/issued/NAME; called again with the same name it
    renews them there. `localhost`, 127.0.0.1 and ::1 are always among its hosts. With `ago` it is as if it had been
    issued so long ago: `ago` longer than `validity` makes one that has expired.
    """
    request = checked_request(roles, run=run, site=site, name=name, hosts=hosts)
    made = authority.Authority.load(folder)
    now = datetime.datetime.now(datetime.UTC) - ago
    written = Path(issuing.issue(made, request, validity=validity, now=now, out=out).folder)
    return Security(
        ca_file=written / "ca.pem", cert_file=written / "cert.pem", key_file=written / "key.pem", token=token
    )


def make_security(folder: Path, *, token: str | None = None) -> Security:
    """Credentials with which processes know each other."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock test")])
    now = datetime.datetime.now(datetime.UTC)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return Security(ca_file=cert_file, cert_file=cert_file, key_file=key_file, token=token)
