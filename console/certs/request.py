"""Checks the request for a certificate: roles, run, site, name, hosts and validity."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from penstock.config import ConfigError
from penstock.security.roles import ANY, Role, role_name

ROLES = tuple(role_name(role) for role in Role.values() if role)
DEFAULT_VALIDITY = timedelta(days=30)
MAX_VALIDITY = timedelta(days=366)
"""Certificates cannot be revoked, so they must expire."""

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_VALIDITY = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The holder of a certificate."""

    roles: tuple[str, ...]
    run: str
    """Run id, or `*` for any."""
    site: str
    """Site, or `*` for any."""
    name: str
    """Common name; limits the ids that its holder may use."""
    hosts: tuple[str, ...]
    """DNS names and IP addresses at which others reach its holder, besides loopback."""


def checked_request(roles: Sequence[str], *, run: str, site: str, name: str, hosts: Sequence[str]) -> Request:
    """Build the request. Raises ConfigError with one line per wrong value."""
    problems = [problem for role in roles if (problem := _role_problem(role))]
    if not roles:
        problems.append(f"ROLE: none given; give one or more of {', '.join(ROLES)}")
    problems += [
        f"{option} {_shown(value)}: must be {rule}"
        for option, value, is_any_allowed in (("--run", run, True), ("--site", site, True), ("--name", name, False))
        if not (_NAME.fullmatch(value) or (is_any_allowed and value == ANY))
        for rule in [f"1 to 64 characters of [A-Za-z0-9._-], not . or ..{', or * for any' if is_any_allowed else ''}"]
    ]
    problems += [f"--host {_shown(host)}: {problem}" for host in hosts if (problem := _host_problem(host))]
    if problems:
        raise ConfigError("\n".join(problems))
    unique_hosts = tuple(dict.fromkeys(str(as_address(host) or host.lower()) for host in hosts))
    return Request(roles=tuple(dict.fromkeys(roles)), run=run, site=site, name=name, hosts=unique_hosts)


def read_validity(*, days: int | None, valid: str | None) -> timedelta:
    """Validity of a certificate, from either option. Raises ConfigError."""
    if days is not None and valid is not None:
        raise ConfigError("--days and --valid are both given; leave one of them out")
    if valid is not None:
        match = _VALIDITY.fullmatch(valid)
        if match is None:
            raise ConfigError(f"--valid {_shown(valid)}: must be a number and one of s, m, h, d, such as 12h or 30d")
        validity, option = timedelta(**{_UNITS[match[2]]: int(match[1])}), f"--valid {valid}"
    elif days is not None:
        validity, option = timedelta(days=min(days, 10**6)), f"--days {days}"
    else:
        return DEFAULT_VALIDITY
    if not timedelta(seconds=1) <= validity <= MAX_VALIDITY:
        raise ConfigError(f"{option}: must be 1 s to {MAX_VALIDITY.days} days; renew by issuing again")
    return validity


def as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _role_problem(role: str) -> str | None:
    if role in ROLES:
        return None
    return f"ROLE {_shown(role)}: no such role; known are {', '.join(ROLES)} (write '*' in quotes for the shell)"


def _host_problem(host: str) -> str | None:
    address = as_address(host)
    if address is not None:
        if "%" in host:
            return "leave out the % and what follows it: other machines name their interfaces differently"
        if address.is_unspecified:
            return "is an address to listen on; give one at which others reach this machine"
        return None
    labels = host.split(".")
    if len(host) <= 253 and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit():
        return None
    return "must be a DNS name or an IP address, without port, scheme or brackets"


def _shown(value: str) -> str:
    return repr(value if len(value) <= 80 else value[:80] + "...")
