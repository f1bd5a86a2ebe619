"""Certificates that are not accepted any more although they are valid: those in the file `revoked` beside `ca.pem`.

    SERIAL NAME     of each, the serial number hexadecimal, a line; `penstock certs revoke` writes them

The file is read again when it has changed. One that cannot be read leaves what was read before in force, with an error
in the log. Servers refuse such callers at each call; streams that are open stay open.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509

from penstock.errors import BadTokenError
from penstock.process.logger import get_logger

REVOKED_FILE = "revoked"
_log = get_logger()


class Revocations:
    """The list of one file, which need not exist; without a path it is empty."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._version: tuple[int, int] | None = None
        self._names: Mapping[int, str] = {}

    def check(self, serial: int) -> None:
        """Raise BadTokenError if the certificate of that serial number is in the list."""
        if (name := self._current().get(serial)) is not None:
            raise BadTokenError(
                f"the certificate of {name!r} (serial {serial:x}) was revoked; issue its holder another one with: "
                "penstock certs issue"
            )

    def check_pem(self, certificate: bytes) -> None:
        """The same of a certificate as PEM."""
        if self._current():
            self.check(_serial(certificate))

    def _current(self) -> Mapping[int, str]:
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


@functools.cache
def revocations_beside(authority: Path | None) -> Revocations:
    """The list of the authorities in a file; one for all servers of this process."""
    return Revocations(None if authority is None else authority.with_name(REVOKED_FILE))


@functools.lru_cache(maxsize=4096)
def _serial(certificate: bytes) -> int:
    return x509.load_pem_x509_certificate(certificate).serial_number
