"""Address and TLS set-up shared by every HTTP server."""

from __future__ import annotations

import logging
import ssl

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from penstock.config import ConfigError
from penstock.network.rpc import PortUnavailableError
from penstock.security import Security


def public_url(address: str, *, setting: str, security: Security) -> str:
    """The base address under which others are to reach a server of this process.

    Args:
        address: host:port, to which the scheme that the server speaks is added; or a complete URL, for example of a
        TLS proxy in front of it.
        setting: Name of the setting that `address` comes from, for the message of the error.
        security: Of this process.

    Raises:
        ConfigError: `address` says http where the server speaks TLS.
    """
    scheme, separator, rest = address.rpartition("://")
    if not separator:
        return f"{'https' if security.serves_tls else 'http'}://{rest}"
    if scheme == "http" and security.serves_tls:
        raise ConfigError(
            f"{setting}: {address} is in plain text, but the server has a certificate (PENSTOCK_TLS_CERT); write "
            f"{rest}, which follows the credentials"
        )
    return address


def _without_traceback(record: logging.LogRecord) -> bool:
    """Malformed HTTP is the sender's fault: log one line, not a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = "a request is no HTTP: %.200s", (" ".join(str(error).split()),)
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


async def listen_http(runner: web.AppRunner, listen: str, *, setting: str, ssl_context: ssl.SSLContext | None) -> str:
    """Listen on host:port; returns the base address, with the port that was chosen for 0.

    Raises:
        PortUnavailableError: It cannot be listened on; the message names `setting` as the place to choose another.
    """
    logging.getLogger("aiohttp.server").addFilter(_without_traceback)
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=ssl_context).start()
    except (OSError, ValueError) as error:
        raise PortUnavailableError(
            f"cannot listen on {listen} ({setting}): {error}; stop the other process or choose another port"
        ) from error
    bound = runner.addresses[0][1]
    return f"{'https' if ssl_context else 'http'}://{host}:{bound}"
