"""Writes the certificate files of a holder into one folder, and renews them there.

The certificate is replaced last, one rename after its key: a reader that reloads both when the certificate's file has
changed finds a matching pair. Between the two renames, and if a command is killed there, the key is newer than the
certificate; a reader that finds a mismatch keeps the pair it has and reads again.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from console.certs.atomic_files import File, named_errors, staged
from console.certs.authority import (
    CERTIFICATE_FILE,
    PRIVATE,
    PUBLIC,
    Authority,
    Signed,
    certificate_pem,
    key_pem,
)
from console.certs.index import Index, Issued
from console.certs.request import Request
from penstock.config import ConfigError

CERT, KEY, ENVIRONMENT = "cert.pem", "key.pem", "env"
ISSUED_FOLDER = "issued"
"""Default output folder, below the authority's: one subfolder per name."""


def issue(
    authority: Authority,
    request: Request,
    *,
    validity: timedelta,
    now: datetime,
    out: Path | None = None,
    at: Path | None = None,
) -> Issued:
    """Sign a certificate and write its holder's files into `out`. Raises ConfigError, and then changes nothing.

    `at` is the path of that folder on its holder's machine, if it differs.
    """
    out = _absolute(out or authority.folder / ISSUED_FOLDER / request.name, "--out")
    place = out if at is None else _absolute(at, "--at")
    if at is not None and not at.is_absolute():
        raise ConfigError(f"--at {str(at)!r}: must be an absolute path, as it names a folder on another machine")
    signed = authority.sign(request, validity=validity, now=now)
    with named_errors(out, "made"):
        out.mkdir(parents=True, exist_ok=True)
        if out.samefile(authority.folder):
            raise ConfigError(f"--out {out}: is the authority's folder, whose key goes to no site; name another one")
    index = Index(authority.folder)
    with index.locked():
        issued = _issued(request, signed, out)
        files = [
            *_authority_file(authority, out, request.name),
            File(ENVIRONMENT, _environment(issued, place).encode(), PUBLIC),
            File(KEY, key_pem(signed.key), PRIVATE),
            File(CERT, certificate_pem(signed.certificate), PUBLIC),
        ]
        # Listed before it can be used: no certificate exists outside the list.
        with staged(out, files):
            index.append(issued)
    return issued


def _authority_file(authority: Authority, out: Path, name: str) -> list[File]:
    """The authority's certificate, unless the file has it already, perhaps beside other trusted ones."""
    _refuse_other_name(out, name)
    path = out / CERTIFICATE_FILE
    if not path.exists():
        return [File(CERTIFICATE_FILE, certificate_pem(authority.certificate), PUBLIC)]
    try:
        with named_errors(path, "read"):
            trusted = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        trusted = []
    if authority.certificate not in trusted:
        raise ConfigError(
            f"{path}: is not the authority in {authority.folder}; name another --out, or delete that file"
        )
    return []


def _refuse_other_name(out: Path, name: str) -> None:
    path = out / CERT
    if not path.exists():
        return
    try:
        with named_errors(path, "read"):
            subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
        names = [attribute.value for attribute in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except ValueError:
        return
    if names != [name]:
        raise ConfigError(
            f"{path}: is the certificate of {', '.join(map(repr, names)) or 'another holder'}, not of {name!r}; name "
            "another --out, or delete that file"
        )


def _issued(request: Request, signed: Signed, folder: Path) -> Issued:
    certificate = signed.certificate
    return Issued(
        **asdict(request),
        serial=f"{certificate.serial_number:x}",
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        folder=str(folder),
    )


def _environment(issued: Issued, place: Path) -> str:
    """The file for `. env`: the variables that every service and command reads."""
    lines = [
        f"# {issued.name}: role {'+'.join(issued.roles)}, run {issued.run}, site {issued.site}; "
        f"expires {issued.not_after:%Y-%m-%d %H:%M:%S} UTC",
        *(
            f"export {variable}={shlex.quote(str(place / file))}"
            for variable, file in (
                ("PENSTOCK_TLS_CA", CERTIFICATE_FILE),
                ("PENSTOCK_TLS_CERT", CERT),
                ("PENSTOCK_TLS_KEY", KEY),
            )
        ),
    ]
    return "\n".join(lines) + "\n"


def _absolute(path: Path, option: str) -> Path:
    if not str(path).isprintable():
        raise ConfigError(f"{option} {str(path)!r}: must hold no control characters; name another folder")
    return Path(os.path.abspath(path))
