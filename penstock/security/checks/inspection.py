"""Finds problems with this process's certificate files, one line each: file, name and fix.

What can never work (a missing file, a key of another certificate) raises ConfigError when files are loaded. Problems
found here may go away while the process runs: files are renewed, clocks are set.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.config import ConfigError
from penstock.security.certificate_files import Loaded, TlsFiles, load
from penstock.security.registered_addresses import is_named

LOOPBACK = "127.0.0.1"
BACKDATED = timedelta(minutes=5)
"""`penstock certs` backdates certificates by this much, since clocks differ."""
ISSUE = "penstock certs issue"
LATE_PART = 3
"""A certificate should have been renewed before the last third of its lifetime."""
_MAX_NAME_CHARS = 100
_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the files; equal to the same problem found at another time."""

    what: str
    """Its identity."""
    text: str = field(compare=False)
    """The file, the problem and the fix."""
    is_error: bool
    """Whether connections fail because of it; else they will later, or only some do."""


def inspect(files: TlsFiles, *, hosts: Sequence[str] = (), now: datetime | None = None) -> list[Finding]:
    """The problems found now.

    Args:
        files: Of this process.
        hosts: Names and addresses under which others reach this process's servers.
        now: The time by this machine's clock.
    """
    try:
        loaded = load(files)
    except ConfigError as error:
        return [Finding("files", str(error), is_error=True)]
    return list(_findings(files, loaded, hosts, now or datetime.now(UTC)))


def covers(certificate: x509.Certificate, host: str) -> bool:
    """Whether its alternative names contain that name or address, compared as clients do."""
    names, addresses = _alternative_names(certificate)
    try:
        # As it is written: to clients, an IPv4 address in IPv6 form is not the IPv4 address.
        return ipaddress.ip_address(host) in addresses
    except ValueError:
        return any(is_named(name, host) for name in names)


def shown_names(certificate: x509.Certificate) -> str:
    """Its alternative names, for messages; the certificate is untrusted."""
    names, addresses = _alternative_names(certificate)
    shown = [printable(str(name)) for name in (*names, *addresses)]
    rest = [f"{len(shown) - _MAX_NAMES} more"] if len(shown) > _MAX_NAMES else []
    return ", ".join([*shown[:_MAX_NAMES], *rest]) or "no name at all"


def common_name(name: x509.Name) -> str:
    """The common name of a subject or issuer, for messages."""
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return repr(printable(str(found[0].value))) if found else "an authority without a name"


def date_problem(certificate: x509.Certificate, now: datetime) -> str:
    """A line saying that it is not valid now, with the local time; empty if it is."""
    clock = f"this machine's clock says {clock_time(now)}"
    if now > certificate.not_valid_after_utc:
        return f"expired at {clock_time(certificate.not_valid_after_utc)} ({clock})"
    if now < certificate.not_valid_before_utc:
        return f"is valid only from {clock_time(certificate.not_valid_before_utc)} on ({clock}, which may be wrong)"
    return ""


def clock_time(moment: datetime) -> str:
    """A time in readable form."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def printable(text: str, *, max_chars: int = _MAX_NAME_CHARS) -> str:
    """Untrusted text, made safe for a line of a log."""
    return "".join(each if each.isprintable() else "?" for each in text[:max_chars])


def _findings(files: TlsFiles, loaded: Loaded, hosts: Sequence[str], now: datetime) -> Iterator[Finding]:
    for authority in loaded.authorities:
        if problem := date_problem(authority, now):
            text = f"{files.ca_variable}: the authority {common_name(authority.subject)} in {files.ca_file} {problem}"
            fix = "put a valid one into that file, and use certificates that it signed"
            yield Finding(f"dates of authority {authority.serial_number}", f"{text}; {fix}", is_error=True)
    if not loaded.chain:
        return
    certificate, where = loaded.chain[0], f"{files.cert_variable}: {files.cert_file}"
    if problem := date_problem(certificate, now):
        yield Finding("dates", f"{where} {problem}; issue it again ({ISSUE}), or set the clock", is_error=True)
    elif problem := lateness(certificate, now):
        yield Finding("end", f"{where} {problem}; issue it again ({ISSUE})", is_error=False)
    if loaded.authorities and not _is_signed(loaded):
        yield Finding(
            "authority",
            f"{where} was signed by {common_name(loaded.chain[-1].issuer)}, which {files.ca_file} "
            f"({files.ca_variable}) does not hold; others with that file refuse it: use the authority's that signed it",
            is_error=True,
        )
    yield from _usage_findings(certificate, where)
    yield from _name_findings(certificate, where, hosts)


def lateness(certificate: x509.Certificate, now: datetime) -> str:
    """A line saying that it ends soon and should have been renewed."""
    whole = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    left = certificate.not_valid_after_utc - now
    if left > max(whole - BACKDATED, timedelta()) / LATE_PART:
        return ""
    return f"expires at {clock_time(certificate.not_valid_after_utc)} and has not been renewed yet"


def _is_signed(loaded: Loaded) -> bool:
    return any(
        certificate == authority or _has_signed(authority, certificate)
        for certificate in loaded.chain
        for authority in loaded.authorities
    )


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _usage_findings(certificate: x509.Certificate, where: str) -> Iterator[Finding]:
    try:
        usages = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except (x509.ExtensionNotFound, ValueError):
        return
    wanted = {ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth", ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth"}
    missing = [name for usage, name in wanted.items() if usage not in usages]
    if missing:
        yield Finding(
            "usage",
            f"{where} lacks the extended key usage {' and '.join(missing)}, so one side of its connections is refused; "
            f"issue it with both ({ISSUE})",
            is_error=True,
        )


def _name_findings(certificate: x509.Certificate, where: str, hosts: Sequence[str]) -> Iterator[Finding]:
    for host in dict.fromkeys(hosts):
        if covers(certificate, host):
            continue
        why = "health checks and services of this machine ask" if host == LOOPBACK else "other machines ask"
        yield Finding(
            f"name {host}",
            f"{where} does not name {printable(host)}, where {why}, but {shown_names(certificate)}; issue it again "
            f"with that name too ({ISSUE} --host {printable(host)})",
            is_error=host != LOOPBACK,
        )


_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address | ipaddress.IPv4Network | ipaddress.IPv6Network


def _alternative_names(certificate: x509.Certificate) -> tuple[list[str], list[_Address]]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return [], []
    return (
        [name.lower() for name in names.get_values_for_type(x509.DNSName)],
        names.get_values_for_type(x509.IPAddress),
    )
