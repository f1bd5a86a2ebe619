"""Finds why TLS with a server fails by a handshake of its own: clients often see only a closed connection.

Promises:
- It blocks for MAX_S at most, however slowly or wrongly the peer answers, plus the time to resolve its name: run it in
  a thread, not in an event loop.
- It claims nothing that it has not seen: an unreachable or silent server is not a TLS problem.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509

from penstock.config import ConfigError
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks.inspection import ISSUE, common_name, covers, date_problem, inspect, shown_names
from penstock.security.tls import ClientContexts

MAX_S = 3.0
FIRST_WORD_S = 1.0
"""How long to wait for a server that stays silent after the handshake: one that refuses us disconnects at once."""
_GRPC = "h2"
_PLAIN_TEXT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "BAD_RECORD_TYPE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server to test, and how this process connects to it."""

    host: str
    port: int
    is_grpc: bool = True
    uses_tls: bool = True
    """Whether this process speaks TLS to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of a handshake."""

    problem: str = ""
    """The problem, with name and fix; empty if TLS is not the cause."""
    certificate: x509.Certificate | None = None
    """The server's certificate, if it showed one."""


def diagnose(server: Server, files: TlsFiles) -> Diagnosis:
    """Try TLS as this process would, and say what is wrong; never raises."""
    deadline_s = time.monotonic() + MAX_S
    try:
        if not server.uses_tls:
            return _plainly(server, files, deadline_s)
        return _securely(server, files, deadline_s)
    except ConfigError as error:
        return Diagnosis(problem=str(error))
    except (OSError, ValueError):
        # Unreachable, silent, or a malformed name: not a TLS problem. UnicodeError is a ValueError.
        return Diagnosis()


def _securely(server: Server, files: TlsFiles, deadline_s: float) -> Diagnosis:
    context = ClientContexts(files).current()
    if server.is_grpc:
        context.set_alpn_protocols([_GRPC])
    try:
        with _connected(server, context, deadline_s) as connection:
            certificate = _certificate(connection)
            return Diagnosis(problem=_first_word(connection, files, deadline_s), certificate=certificate)
    except ssl.SSLCertVerificationError as error:
        certificate = _shown_certificate(server, deadline_s)
        return Diagnosis(problem=_unverified(error, certificate, server, files), certificate=certificate)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        # A proxy whose server is away disconnects in the same way.
        return Diagnosis()
    except ssl.SSLError as error:
        return Diagnosis(problem=_failed(error, files))


def _plainly(server: Server, files: TlsFiles, deadline_s: float) -> Diagnosis:
    """We connect in plain text: find out whether the server expects TLS."""
    context = _trusting_all()
    if server.is_grpc:
        context.set_alpn_protocols([_GRPC])
    try:
        with _connected(server, context, deadline_s) as connection:
            certificate = _certificate(connection)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return Diagnosis()
        certificate = None
    fix = (
        f"write https:// in its address ({files.ca_variable} is set)"
        if files.ca_file is not None
        else f"set {files.ca_variable} to the authority's file, and {files.cert_variable} and {files.key_variable}"
    )
    return Diagnosis(problem=f"it speaks TLS, this process speaks plain text to it; {fix}", certificate=certificate)


def _connected(server: Server, context: ssl.SSLContext, deadline_s: float) -> ssl.SSLSocket:
    plain = socket.create_connection((server.host, server.port), timeout=_left_s(deadline_s))
    try:
        plain.settimeout(_left_s(deadline_s))
        return context.wrap_socket(plain, server_hostname=server.host, suppress_ragged_eofs=False)
    except BaseException:
        plain.close()
        raise


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _first_word(connection: ssl.SSLSocket, files: TlsFiles, deadline_s: float) -> str:
    """With TLS 1.3 a refused client learns of it only after its own handshake, from its next read."""
    connection.settimeout(min(FIRST_WORD_S, _left_s(deadline_s)))
    try:
        if connection.recv(1):
            return ""
    except TimeoutError:
        return ""
    except (ssl.SSLEOFError, ConnectionError):
        pass
    except ssl.SSLError as error:
        return _failed(error, files)
    return _refused("", files)


def _failed(error: ssl.SSLError, files: TlsFiles) -> str:
    reason = error.reason or type(error).__name__
    if reason in _PLAIN_TEXT:
        return (
            "it speaks plain text, this process TLS; start it with "
            f"{files.cert_variable} and {files.key_variable}, or name the port that speaks TLS"
        )
    if "ALERT" in reason:
        return _refused(f" ({reason.lower().replace('_', ' ')})", files)
    return f"the TLS handshake fails ({reason.lower().replace('_', ' ')})"


def _refused(alert: str, files: TlsFiles) -> str:
    """The server disconnected after our certificate: what may be wrong with that."""
    if files.cert_file is None:
        return (
            f"it refuses clients without a certificate{alert}; set {files.cert_variable} and {files.key_variable} to "
            "one that its authority signed"
        )
    own = [finding.text for finding in inspect(files) if finding.is_error]
    if own:
        return f"it refuses this process's certificate{alert}: {own[0]}"
    return (
        f"it refuses this process's certificate {files.cert_file}{alert}; that server's {files.ca_variable} must hold "
        "the authority that signed it, and its clock must be right"
    )


def _unverified(
    error: ssl.SSLCertVerificationError, certificate: x509.Certificate | None, server: Server, files: TlsFiles
) -> str:
    trusted = f"{files.ca_file} ({files.ca_variable})" if files.ca_file is not None else "this machine"
    if certificate is None:
        return f"its certificate is not trusted: {error.verify_message}; check {trusted}, and its certificate"
    if problem := date_problem(certificate, datetime.now(UTC)):
        return f"its certificate {problem}; issue it again there ({ISSUE}), or set the clock that is wrong"
    if "mismatch" in error.verify_message and not covers(certificate, server.host):
        return (
            f"its certificate does not name {server.host}, but {shown_names(certificate)}; issue it again there with "
            f"{ISSUE} --host {server.host}, or reach it by one of those names"
        )
    own = [finding.text for finding in inspect(files) if finding.is_error and files.ca_variable in finding.text]
    return (
        f"its certificate was signed by {common_name(certificate.issuer)}, which {trusted} does not hold or does not "
        f"trust ({error.verify_message}); {own[0] if own else 'put the authority that signed it into that file'}"
    )


def _shown_certificate(server: Server, deadline_s: float) -> x509.Certificate | None:
    with contextlib.suppress(OSError, ValueError), _connected(server, _trusting_all(), deadline_s) as connection:
        return _certificate(connection)
    return None


def _certificate(connection: ssl.SSLSocket) -> x509.Certificate | None:
    shown = connection.getpeercert(binary_form=True)
    try:
        return x509.load_der_x509_certificate(shown) if shown else None
    except ValueError:
        return None


def _trusting_all() -> ssl.SSLContext:
    """A context to inspect a server's certificate; nothing is sent over such a connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
