"""Certificates that are not accepted any more although they are valid: those in the file `revoked` beside `ca.pem`.

    SERIAL NAME     of each, the serial number hexadecimal, a line; `penstock certs revoke` writes them

The file is read again when it has changed. One that cannot be read leaves what was read before in force, with an error
in the log. Servers refuse such callers at each call, and end the calls and connections that they have open within
LOOK_EVERY_S of the change.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509

from penstock.errors import BadTokenError
from penstock.process.logger import get_logger

REVOKED_FILE = "revoked"
LOOK_EVERY_S = 1.0
"""How often a server compares what its callers have open with the list."""
_log = get_logger()


class Revocations:
    """The list of one file, which need not exist; without a path it is empty."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._version: tuple[int, int] | None = None
        self._names: Mapping[int, str] = {}

    def check(self, serial: int) -> None:
        """Raise BadTokenError if the certificate of that serial number is in the list."""
        if (name := self.names().get(serial)) is not None:
            raise _refusal(name, serial)

    def check_pem(self, certificate: bytes) -> None:
        """The same of a certificate as PEM."""
        if self.names():
            self.check(serial_of_pem(certificate))

    def names(self) -> Mapping[int, str]:
        """Holders of the certificates in the list as it is now, by serial number."""
        if self.path is None:
            return self._names
        try:
            found = self.path.stat()
            version = (found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            self._version, self._names = None, {}
            return self._names
        except OSError as error:
            self._say(error)
            return self._names
        if version != self._version:
            self._version = version
            try:
                lines = (line.split() for line in self.path.read_text(encoding="utf-8").splitlines())
                self._names = {int(words[0], 16): " ".join(words[1:]) for words in lines if words}
            except (OSError, ValueError) as error:
                self._say(error)
        return self._names

    def _say(self, error: Exception) -> None:
        _log.error("the list of revoked certificates cannot be read", path=str(self.path), error=str(error))


class OpenCallers:
    """Ends what callers have open at one server, of one event loop, once their certificates are revoked.

    Args:
        revocations: The list that its server goes by.
    """

    def __init__(self, revocations: Revocations) -> None:
        self._revocations = revocations
        self._calls: dict[Callable[[BadTokenError], None], int] = {}
        self._connections: dict[asyncio.Transport, int] = {}
        self._is_looking = False

    @contextmanager
    def call(self, serial: int, end: Callable[[BadTokenError], None]) -> Iterator[None]:
        """A call that goes on inside, and is ended by `end` if its certificate is revoked. Raises BadTokenError."""
        self._revocations.check(serial)
        self._calls[end] = serial
        self._look_later()
        try:
            yield
        finally:
            self._calls.pop(end, None)

    def connection(self, transport: asyncio.Transport | None, serial: int) -> None:
        """A connection, None if it is gone, which is cut if its certificate is revoked. Raises BadTokenError."""
        self._revocations.check(serial)
        if transport is not None:
            self._connections[transport] = serial
            self._look_later()

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._connections = {each: serial for each, serial in self._connections.items() if not each.is_closing()}
        if names := self._revocations.names():
            for end, serial in list(self._calls.items()):
                if serial in names:
                    del self._calls[end]
                    end(_refusal(names[serial], serial))
            for transport, serial in self._connections.items():
                if serial in names:
                    transport.abort()
        if self._calls or self._connections:
            self._look_later()


def _refusal(name: str, serial: int) -> BadTokenError:
    return BadTokenError(
        f"the certificate of {name!r} (serial {serial:x}) was revoked; issue its holder another one with: "
        "penstock certs issue"
    )


@functools.cache
def revocations_beside(authority: Path | None) -> Revocations:
    """The list of the authorities in a file; one for all servers of this process."""
    return Revocations(None if authority is None else authority.with_name(REVOKED_FILE))


@functools.lru_cache(maxsize=4096)
def serial_of_pem(certificate: bytes) -> int:
    """The serial number of a certificate as PEM."""
    return x509.load_pem_x509_certificate(certificate).serial_number
