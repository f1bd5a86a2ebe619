"""Where plain text is allowed: on loopback and local sockets; elsewhere only if the configuration says so."""

from __future__ import annotations

import ipaddress
import os

from penstock.config import ConfigError

INSECURE_VARIABLE = "PENSTOCK_INSECURE"
HOW_TO_ALLOW = f"set insecure: true in the configuration ({INSECURE_VARIABLE}=true for commands without one)"


def is_local(address: str) -> bool:
    """Whether only this machine reaches host:port: 127.0.0.0/8, ::1, localhost, and unix sockets.

    Other names are not looked up: their meaning may change.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def how_to_protect(prefix: str) -> str:
    """How to protect a plain-text listener; `prefix` is that of the variables."""
    return f"make certificates (penstock certs) and set {prefix}_TLS_CA, {prefix}_TLS_CERT and {prefix}_TLS_KEY"


def is_allowed_by_environment() -> bool:
    """What PENSTOCK_INSECURE says. Raises ConfigError."""
    value = os.environ.get(INSECURE_VARIABLE, "")
    if value.lower() in ("", "false", "0"):
        return False
    if value.lower() in ("true", "1"):
        return True
    raise ConfigError(f"{INSECURE_VARIABLE}: {value!r:.40} must be true or false")


def plain_listener_problem(listen: str, *, setting: str, fix: str) -> str:
    """The message for a listener that is refused."""
    return (
        f"{setting}: {listen} is reached from other machines, and would be in plain text; listen on 127.0.0.1, "
        f"or {fix}, or {HOW_TO_ALLOW}"
    )


def plain_listener_warning(listen: str) -> str:
    """The warning for one that is allowed, at every start."""
    return (
        f"{listen} is in plain text (insecure: true): whoever reaches it or carries what passes can read and change it"
    )


def missing_halves(
    prefix: str, *, has_ca: bool, has_cert: bool, has_key: bool, has_token: bool, allows_plain: bool
) -> list[str]:
    """The missing parts of incomplete credentials, one line each; `prefix` is that of the variables."""
    problems = []
    if has_cert and not has_key:
        problems.append(
            f"{prefix}_TLS_KEY: missing beside {prefix}_TLS_CERT; name the file of the certificate's private key"
        )
    if has_key and not has_cert:
        problems.append(
            f"{prefix}_TLS_CERT: missing beside {prefix}_TLS_KEY; name the file of the certificate that the key is of"
        )
    if has_ca:
        return problems
    if has_cert or has_key:
        problems.append(
            f"{prefix}_TLS_CA: missing beside {prefix}_TLS_{'CERT' if has_cert else 'KEY'}; name the file of the "
            "authority's certificate (ca.pem of penstock certs), without which nobody's certificate is checked"
        )
    elif has_token and not allows_plain:
        problems.append(
            f"{prefix}_TLS_CA: missing beside {prefix}_TOKEN, which would go over plain sockets; name the file of the "
            f"authority's certificate (ca.pem of penstock certs), or {HOW_TO_ALLOW}"
        )
    return problems
