"""Parses the forms of `redis_url`: one server, a service watched by Sentinels, or a Cluster. Pure.

    redis://HOST:PORT/DB   rediss://...   unix://PATH?db=DB     one server, as redis-py reads it
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE[/DB]           the master of SERVICE, as these Sentinels know it
    redis+cluster://HOST:PORT,HOST:PORT                         a Cluster, found through any of these nodes

`rediss+sentinel` and `rediss+cluster` use TLS, also to the Sentinels. USER:PASSWORD@ before the first host is for
the data nodes. The Sentinels' own password and certificates belong in no configuration: see `authentication`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote, unquote

SINGLE_SCHEMES = ("redis://", "rediss://", "unix://")
PASSWORD_VARIABLE = "PENSTOCK_REDIS_PASSWORD"
MAX_HOSTS = 64
_GROUP_URL = re.compile(r"(?P<tls>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<login>[^@/]*)@)?(?P<rest>.*)")
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")

Host = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Where the records are."""

    kind: Literal["single", "sentinel", "cluster"]
    url: str = ""
    """URL of one server, as redis-py reads it."""
    hosts: tuple[Host, ...] = ()
    """Sentinels, or nodes of the Cluster."""
    service: str = ""
    """The master's name in the Sentinels."""
    db: int = 0
    username: str | None = None
    password: str | None = None
    is_tls: bool = False


def with_password(url: str, password: str | None) -> str:
    """`url` with this password, unless it has its own or is a local socket."""
    scheme, _, rest = url.partition("://")
    login, at, hosts = rest.rpartition("@")
    if password is None or scheme in ("unix", "memory") or ":" in login:
        return url
    return f"{scheme}://{login}:{quote(password, safe='')}@{hosts if at else rest}"


def parse_redis_url(url: str) -> RedisAddress:
    """The address that a URL names; raises ValueError naming the wrong part and its correct form."""
    if url.startswith(SINGLE_SCHEMES):
        return RedisAddress(kind="single", url=url)
    match = _GROUP_URL.fullmatch(url)
    if match is None:
        raise ValueError(
            "must begin with redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or "
            "rediss+cluster://"
        )
    username, _, password = (match["login"] or "").partition(":")
    names, _, path = match["rest"].partition("/")
    address = RedisAddress(
        kind="cluster" if match["kind"] == "cluster" else "sentinel",
        hosts=_hosts(names),
        username=unquote(username) or None,
        password=unquote(password) or None,
        is_tls=match["tls"] == "rediss",
    )
    if address.kind == "cluster":
        if path:
            raise ValueError(f"a Redis Cluster has one database: drop /{path}")
        return address
    service, _, db = path.partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError("write it as redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or .../SERVICE/DB")
    return replace(address, service=unquote(service), db=int(db or "0"))


def _hosts(names: str) -> tuple[Host, ...]:
    hosts: list[Host] = []
    for name in names.split(","):
        match = _HOST.fullmatch(name)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ValueError(f"{name!r} is not HOST:PORT; separate several by commas")
        hosts.append((match["host"].strip("[]"), int(match["port"])))
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"{len(hosts)} hosts are more than {MAX_HOSTS}; a few are enough to find the others")
    return tuple(hosts)
