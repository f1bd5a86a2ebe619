"""Addresses that services register for others to call: well formed, and the registering peer's own.

Other services call such an address with their credentials, from inside their own networks. So a host is accepted
only if it

- is the address that the peer calls from, or a name that resolves to it,
- is a name or address in the certificate that the peer showed, and not loopback, which every certificate may name,
- is this very machine, and the peer is on it too, or
- is one that the server's own configuration trusts: for sites behind NAT whose services have no certificates.

A peer that connects by TLS registers https only. Without certificates a name is only as good as its DNS: it may
resolve elsewhere later.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Self
from urllib.parse import SplitResult, unquote, urlsplit

import grpc

from penstock.errors import InvalidFieldError
from penstock.security.resolving import Resolver

MAX_URL_CHARACTERS = 2048
MAX_HOST_CHARACTERS = 253

Address = IPv4Address | IPv6Address
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_VISIBLE = re.compile(r"[!-~]+")


def check_url(field: str, url: str, *, allows_query: bool = False) -> SplitResult:
    """The parts of an http or https URL. Raises InvalidFieldError if it is malformed or ambiguous."""
    problem = _problem_of(url, allows_query=allows_query)
    if problem is not None:
        raise InvalidFieldError(f"{field}: {url!r:.200} {problem}", field=field)
    return urlsplit(url)


def _problem_of(url: str, *, allows_query: bool) -> str | None:
    if len(url) > MAX_URL_CHARACTERS:
        return f"has {len(url)} characters; at most {MAX_URL_CHARACTERS} are allowed"
    # Python's parser drops some of these, and other parsers read them differently: one text must not mean two hosts.
    if _VISIBLE.fullmatch(url) is None or "\\" in url:
        return "must be visible ASCII characters without backslashes; encode others with %"
    try:
        return _problem_of_parts(urlsplit(url), allows_query=allows_query)
    except ValueError as error:
        return f"is no address: {error}"


def _problem_of_parts(parts: SplitResult, *, allows_query: bool) -> str | None:
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if "%" in parts.netloc:
        return "must name a host without %: neither a zone nor anything encoded"
    if "@" in parts.netloc or ((parts.query or parts.fragment) and not allows_query):
        return "must have no user, query or fragment"
    if as_ip(host) is None and not (_HOST.fullmatch(host) and len(host) <= MAX_HOST_CHARACTERS):
        return "must name a host: an address, or a name of letters, digits, dots and dashes"
    if parts.port == 0 or parts.netloc.endswith(":"):
        return "must have a port of 1 to 65535"
    return None


def as_ip(host: str) -> Address | None:
    """The IP address of a host; None if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The peer that registers an address, as far as its connection shows."""

    ip: Address | None
    """The address it calls from; None if unknown."""
    names: tuple[str, ...] = ()
    """Names and addresses in its certificate."""
    is_tls: bool = False
    """Whether it connected by TLS."""

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext[Any, Any]) -> Self:
        """The caller of a gRPC method."""
        properties = context.auth_context()
        names = properties.get("x509_subject_alternative_name", ())
        return cls(
            ip=_ip_of(context.peer()),
            names=tuple(name.decode("ascii", "replace") for name in names),
            is_tls=b"ssl" in tuple(properties.get("transport_security_type", ())),
        )

    def is_at(self, address: Address) -> bool:
        """Whether it calls from that address, or both are on this machine."""
        if self.ip is None or address.is_unspecified or address.is_multicast:
            return False
        return address == self.ip or (self.ip.is_loopback and (address.is_loopback or _is_of_this_machine(address)))

    def shows(self, host: str) -> bool:
        """Whether its certificate names the host."""
        address = as_ip(host)
        if address is not None:
            return not address.is_loopback and address in map(as_ip, self.names)
        return not _is_localhost(host) and any(is_named(name, host) for name in self.names)


class TrustedHosts:
    """Hosts that a configuration trusts; raises ValueError for malformed text.

    Args:
        texts: A name ("gpu-1.example"), all names below one (".example"), an address or a network ("10.0.0.0/8").
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._names: list[str] = []
        self._networks: list[IPv4Network | IPv6Network] = []
        for text in texts:
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                if _HOST.fullmatch(text.removeprefix(".")) is None or "/" in text:
                    raise ValueError(
                        f"{text!r}: name a host, all below a domain (.example.com), an address or a network "
                        f"(10.0.0.0/8): {error}"
                    ) from error
                self._names.append(_plain(text))

    def has_name(self, host: str) -> bool:
        """Whether a name is trusted."""
        return any(
            _plain(host) == name or (name.startswith(".") and _plain(host).endswith(name)) for name in self._names
        )

    def has_address(self, address: Address) -> bool:
        """Whether an address is trusted, by itself or by its network."""
        return any(address in network for network in self._networks)


def checked_trusted_hosts(texts: tuple[str, ...]) -> tuple[str, ...]:
    """`texts` if TrustedHosts accepts them; raises ValueError."""
    TrustedHosts(texts)
    return texts


class OwnAddresses:
    """Whether an address is the registering peer's own.

    Args:
        trusted: Hosts that every peer may register.
        setting: Where those are configured, for messages.
        resolver: Resolves names.
    """

    def __init__(self, trusted: Sequence[str] = (), *, setting: str, resolver: Resolver | None = None) -> None:
        self._trusted = TrustedHosts(trusted)
        self._setting = setting
        self._resolver = resolver or Resolver()

    async def check(self, field: str, url: str, peer: Peer) -> None:
        """Raise InvalidFieldError unless `url` is well formed and the peer's own, or trusted."""
        parts = check_url(field, url)
        host = parts.hostname or ""
        if peer.is_tls and parts.scheme != "https":
            raise InvalidFieldError(
                f"{field}: {url!r:.200} is in plain text, but its owner came by TLS; register an https address",
                field=field,
            )
        if self._trusted.has_name(host) or peer.shows(host):
            return
        own = as_ip(host)
        addresses = await self._resolver.addresses(host) if own is None else frozenset((own,))
        if not any(peer.is_at(address) or self._trusted.has_address(address) for address in addresses):
            found = (
                "" if own else f", and {host} is {', '.join(sorted(map(str, addresses))) or 'no name that is known'}"
            )
            raise InvalidFieldError(
                f"{field}: {url!r:.200} is not the caller's own: it calls from {peer.ip or 'nowhere known'}{found}; "
                f"show a certificate that names {host}, or add it to {self._setting}",
                field=field,
            )


def _ip_of(peer: str) -> Address | None:
    """The address in gRPC's "ipv4:127.0.0.1:50051", "ipv6:%5B::1%5D:50051" or "unix:"."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return ipaddress.IPv4Address("127.0.0.1")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    return as_ip(host) if kind in ("ipv4", "ipv6") else None


def _is_of_this_machine(address: Address) -> bool:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def is_named(pattern: str, host: str) -> bool:
    """Whether a DNS name of a certificate covers a host: a star stands for its first label."""
    pattern, host = _plain(pattern), _plain(host)
    return pattern == host or (pattern.startswith("*.") and pattern[1:] == f".{host.partition('.')[2]}")


def _is_localhost(host: str) -> bool:
    return _plain(host) == "localhost" or _plain(host).endswith(".localhost")


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
