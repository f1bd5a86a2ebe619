"""Address and TLS set-up shared by every HTTP server."""

from __future__ import annotations

import asyncio
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


class _BoundedSite(web.BaseSite):
    """A listener that ends connections beyond a number of them as they come."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, *, ssl_context: ssl.SSLContext | None, most: int | None
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context)
        self._host, self._port, self._most = host, port, most

    @property
    def name(self) -> str:
        """The address that was asked for."""
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection, self._host, self._port, ssl=self._ssl_context, backlog=self._backlog
        )

    def _connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        is_full = server is None or (self._most is not None and len(server.connections) >= self._most)
        return _Refusal() if server is None or is_full else server()


class _Refusal(asyncio.Protocol):
    """Ends its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def listen_http(
    runner: web.AppRunner,
    listen: str,
    *,
    setting: str,
    ssl_context: ssl.SSLContext | None,
    max_connections: int | None = None,
) -> str:
    """Listen on host:port; returns the base address, with the port that was chosen for 0.

    Args:
        runner: The application, set up.
        listen: host:port.
        setting: Where that comes from.
        ssl_context: None for plain text.
        max_connections: Connections at once, beyond which new ones are closed as they come.

    Raises:
        PortUnavailableError: It cannot be listened on; the message names `setting` as the place to choose another.
    """
    logging.getLogger("aiohttp.server").addFilter(_without_traceback)
    host, _, port = listen.rpartition(":")
    try:
        site = _BoundedSite(runner, host.strip("[]"), int(port), ssl_context=ssl_context, most=max_connections)
        await site.start()
    except (OSError, ValueError) as error:
        raise PortUnavailableError(
            f"cannot listen on {listen} ({setting}): {error}; stop the other process or choose another port"
        ) from error
    bound = runner.addresses[0][1]
    return f"{'https' if ssl_context else 'http'}://{host}:{bound}"
