"""Reads the credentials between a broker and Redis or its Sentinels, from the environment and files only.

PENSTOCK_REDIS_PASSWORD(_FILE)      for a redis_url that holds none
PENSTOCK_SENTINEL_PASSWORD(_FILE)   the Sentinels' own
PENSTOCK_REDIS_CA, _CERT, _KEY      TLS of rediss:// (Sentinels' too); if none is set, the PENSTOCK_TLS_* files
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.config import ConfigError
from penstock.secret import read_secret
from penstock.security import Security
from penstock.security.plain_text import HOW_TO_ALLOW, is_local
from services.broker.storage.redis.address import PASSWORD_VARIABLE, RedisAddress, parse_redis_url, with_password

SENTINEL_PASSWORD_VARIABLE = "PENSTOCK_SENTINEL_PASSWORD"
_PREFIX = "PENSTOCK_REDIS"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCredentials:
    """Credentials besides those in the URL."""

    ca_file: Path | None = None
    """Certificate authorities of servers, PEM; the machine's own if None."""
    cert_file: Path | None = None
    """Client certificate, PEM."""
    key_file: Path | None = None
    """Its private key, PEM."""
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, security: Security) -> RedisCredentials:
        """Read from the variables, else from the files of `security`. Raises ConfigError."""
        ca, cert, key = (_file(name) for name in ("CA", "CERT", "KEY"))
        if (cert is None) != (key is None):
            missing, given = ("KEY", "CERT") if key is None else ("CERT", "KEY")
            raise ConfigError(
                f"{_PREFIX}_{missing}: missing beside {_PREFIX}_{given}; name the file of the certificate and that of "
                "its private key"
            )
        if ca is None and cert is None:
            ca, cert, key = security.ca_file, security.cert_file, security.key_file
        return cls(ca_file=ca, cert_file=cert, key_file=key, sentinel_password=read_secret(SENTINEL_PASSWORD_VARIABLE))

    @property
    def tls_settings(self) -> dict[str, Any]:
        """Arguments of TLS connections, as redis-py names them."""
        files = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        named = {name: str(path) for name, path in files.items() if path is not None}
        return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **named}


NO_CREDENTIALS = RedisCredentials()


def protected_url(url: str, credentials: RedisCredentials, *, setting: str, security: Security) -> str:
    """`url` with the password of the environment.

    Args:
        url: As configured; `parse_redis_url` accepts it.
        credentials: The credentials to use with it.
        setting: Name of the setting it comes from, for the message.
        security: Says whether plain text is allowed.

    Raises:
        ConfigError: A password would be sent beyond loopback in plain text.
    """
    found = with_password(url, read_secret(PASSWORD_VARIABLE))
    address = parse_redis_url(found)
    exposed = None if security.allows_plain else _exposed_host(address, credentials)
    if exposed is not None:
        raise ConfigError(
            f"{setting}: a password would go to {exposed} in plain text; write it as rediss://, rediss+sentinel:// or "
            f"rediss+cluster://, or {HOW_TO_ALLOW}"
        )
    return found


def _exposed_host(address: RedisAddress, credentials: RedisCredentials) -> str | None:
    """A server on another machine that would be sent a password without TLS."""
    if address.kind == "single":
        parts = urlsplit(address.url)
        is_shown = parts.scheme == "redis" and bool(parts.password)
        hosts = [f"{parts.hostname or 'localhost'}:{parts.port or 6379}"] if is_shown else []
    elif address.is_tls or not (address.password or credentials.sentinel_password):
        hosts = []
    else:
        # Further servers named by Sentinels and a Cluster's nodes are known only later.
        hosts = [f"{host}:{port}" for host, port in address.hosts]
    return next((host for host in hosts if not is_local(host)), None)


def _file(name: str) -> Path | None:
    value = os.environ.get(f"{_PREFIX}_{name}")
    return Path(value) if value else None
