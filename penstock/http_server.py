"""What every HTTP server here needs of its address and of TLS."""

from __future__ import annotations

import ssl

from aiohttp import web

from penstock.rpc import PortUnavailableError
from penstock.security import Security


async def listen_http(runner: web.AppRunner, listen: str, *, setting: str, ssl_context: ssl.SSLContext | None) -> str:
    """Listen on host:port; returns the base address, with the port that was chosen for 0.

    Raises:
        PortUnavailableError: It cannot be listened on; `setting` is named as where to choose another.
    """
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=ssl_context).start()
    except (OSError, ValueError) as error:
        raise PortUnavailableError(
            f"cannot listen on {listen} ({setting}): {error}; stop the other process or choose another port"
        ) from error
    bound = runner.addresses[0][1]
    return f"{'https' if ssl_context else 'http'}://{host}:{bound}"


def server_ssl_context(security: Security, *, requires_certificates: bool = True) -> ssl.SSLContext | None:
    """TLS as `security` says, None without a certificate. What clients show must be its authority's.

    Args:
        security: Of this process.
        requires_certificates: Clients must show one; otherwise they may, and HttpAccess refuses who shows nothing.
    """
    if security.cert_file is None or security.key_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(security.cert_file, security.key_file)
    if security.ca_file is not None:
        context.load_verify_locations(security.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED if requires_certificates else ssl.CERT_OPTIONAL
    return context
