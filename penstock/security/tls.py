"""TLS of this process's servers and clients: ports, channels, and contexts for HTTP.

Promises:
- Renewed files, authorities included, are used for every connection from then on, without a restart.
- Connections outlive the certificate they were made with. A channel's streams stay where they are until they end; the
  next one goes over a connection made with the new files.
- While files are being replaced, or cannot be used, the previous ones stay in use.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc

from penstock.channels import SwitchingChannel
from penstock.config import ConfigError
from penstock.security.certificate_files import Followed, Loaded, TlsFiles, load_or_last


def add_port(server: grpc.aio.Server, listen: str, files: TlsFiles) -> int:
    """Bind `listen`, with TLS when there is a certificate; returns the port. Raises ConfigError."""
    if files.cert_file is None or files.key_file is None:
        return server.add_insecure_port(listen)
    followed = Followed(files, _server_configuration)
    first = used = followed.current()

    def renewed() -> Any:
        """Called for each handshake, in a gRPC thread: returns the new configuration, or None if it is unchanged."""
        nonlocal used
        before, used = used, followed.current()
        return None if used is before else used

    credentials = grpc.dynamic_ssl_server_credentials(
        first, renewed, require_client_authentication=files.ca_file is not None
    )
    return server.add_secure_port(listen, credentials)


def _server_configuration(_files: TlsFiles, loaded: Loaded) -> Any:
    pair = (loaded.key_pem or b"", loaded.cert_pem or b"")
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=loaded.ca_pem)


class RenewedChannel(SwitchingChannel):
    """A channel that moves to a new one when the files have changed; calls under way end on the old one.

    Args:
        files: With an authority.
        open_channel: Opens one with these credentials.

    Raises:
        ConfigError: The files cannot be used.
    """

    def __init__(self, files: TlsFiles, open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._num_calls: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._followed = Followed(files, self._opened)

    def _opened(self, _files: TlsFiles, loaded: Loaded) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(loaded.ca_pem, loaded.key_pem, loaded.cert_pem)
        channel = self._open_channel(credentials)
        self._num_calls[channel] = 0
        return channel

    def _current(self) -> grpc.aio.Channel:
        current = self._followed.current()
        for channel in [one for one, num_calls in self._num_calls.items() if one is not current and not num_calls]:
            self._retire(channel)
        return current

    def _all(self) -> Iterable[grpc.aio.Channel]:
        return list(self._num_calls)

    def _begun(self, channel: grpc.aio.Channel) -> None:
        self._num_calls[channel] += 1

    def _ended(self, channel: grpc.aio.Channel, _call: Any) -> None:
        if channel in self._num_calls:
            self._num_calls[channel] -= 1

    def _retire(self, channel: grpc.aio.Channel) -> None:
        del self._num_calls[channel]
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Close the channels; calls under way get `grace` seconds to end."""
        await asyncio.gather(super().close(grace), *self._closing)


class ClientContexts:
    """Contexts for HTTP clients: one for each state of the files; connections made with an older one go on.

    Without an authority the machine's own are trusted, and no certificate is shown. Raises ConfigError.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.is_of_files = files.ca_file is not None
        """Whether the process has its own authority: then nothing is sent in plain text."""
        self._followed = Followed(files, _client_context) if self.is_of_files else None

    def current(self) -> ssl.SSLContext:
        """The context for a connection that is made now."""
        if self._followed is None:
            # Only when needed: the machine's authorities take a while to read.
            self._followed = Followed(TlsFiles(), _client_context)
        return self._followed.current()


def _client_context(files: TlsFiles, loaded: Loaded) -> ssl.SSLContext:
    if files.ca_file is None:
        return ssl.create_default_context()
    with _translated(files):
        context = ssl.create_default_context(cadata=(loaded.ca_pem or b"").decode("ascii", "replace"))
        if files.cert_file is not None:
            context.load_cert_chain(files.cert_file, files.key_file)
    return context


def server_context(files: TlsFiles, *, requires_certificates: bool = True) -> ssl.SSLContext | None:
    """The context of an HTTP server; None without a certificate. Raises ConfigError.

    Args:
        files: Of this process.
        requires_certificates: Clients must show one that our authority signed; otherwise they may, and HttpAccess
            refuses those that show none.
    """
    if files.cert_file is None or files.key_file is None:
        return None
    verify_mode = ssl.CERT_REQUIRED if requires_certificates else ssl.CERT_OPTIONAL
    followed = Followed(files, partial(_server_context, verify_mode=verify_mode))
    context = _server_context(files, load_or_last(files), verify_mode=verify_mode)

    def renew(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called at each client's first message, whatever name it asks for."""
        connection.context = followed.current()

    context.sni_callback = renew
    return context


def _server_context(files: TlsFiles, loaded: Loaded, *, verify_mode: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with _translated(files):
        context.load_cert_chain(str(files.cert_file), files.key_file)
        if loaded.ca_pem is not None:
            context.load_verify_locations(cadata=loaded.ca_pem.decode("ascii", "replace"))
            context.verify_mode = verify_mode
    return context


@contextmanager
def _translated(files: TlsFiles) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise ConfigError(f"{', '.join(map(str, files.paths))}: cannot be used: {error}; make them again") from error
