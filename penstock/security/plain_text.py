"""Where plain text is allowed: on loopback and local sockets; elsewhere only if the configuration says so."""

from __future__ import annotations

import os

from penstock.config import ConfigError
from penstock.security.certificate_files import TlsFiles
from penstock.security.registered_addresses import as_ip

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
    ip = as_ip(host)
    return ip is not None and ip.is_loopback


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
        f"{listen} is in plain text (insecure: true): anyone who reaches it, or is on the way, can read and change "
        "what passes"
    )


def missing_halves(files: TlsFiles, *, has_token: bool, allows_plain: bool) -> list[str]:
    """The missing parts of incomplete credentials, one line each."""
    ca, cert, key = files.ca_variable, files.cert_variable, files.key_variable
    problems = []
    if files.cert_file and not files.key_file:
        problems.append(f"{key}: missing beside {cert}; name the file of the certificate's private key")
    if files.key_file and not files.cert_file:
        problems.append(f"{cert}: missing beside {key}; name the file of the certificate that the key is of")
    if files.ca_file:
        return problems
    if files.cert_file or files.key_file:
        problems.append(
            f"{ca}: missing beside {cert if files.cert_file else key}; name the file of the authority's certificate "
            "(ca.pem of penstock certs), without which no certificate is checked"
        )
    elif has_token and not allows_plain:
        problems.append(
            f"{ca}: missing beside {files.prefix}_TOKEN, which would go over plain sockets; name the file of the "
            f"authority's certificate (ca.pem of penstock certs), or {HOW_TO_ALLOW}"
        )
    return problems
