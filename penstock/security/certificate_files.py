"""The certificate files of a process, read again when they change.

Files are renewed one after the other: a mismatched or unreadable set leaves what was made of the previous files in
use, and is read again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from penstock.config import ConfigError
from penstock.process.logger import get_logger

LOOK_EVERY_S = 0.2
"""Minimum time between looks at the files: a process may make thousands of calls a second."""

_Made = TypeVar("_Made")
_log = get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the files; None for those not used."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    prefix: str = "PENSTOCK"
    """Prefix of the variables that name them; for messages."""

    @property
    def ca_variable(self) -> str:
        """Names the authorities' file."""
        return f"{self.prefix}_TLS_CA"

    @property
    def cert_variable(self) -> str:
        """Names the certificate's file."""
        return f"{self.prefix}_TLS_CERT"

    @property
    def key_variable(self) -> str:
        """Names the key's file."""
        return f"{self.prefix}_TLS_KEY"

    @property
    def paths(self) -> list[Path]:
        """Those in use."""
        return [path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Contents of the files: complete and consistent."""

    authorities: tuple[x509.Certificate, ...]
    chain: tuple[x509.Certificate, ...]
    """This process's certificate first."""
    ca_pem: bytes | None
    cert_pem: bytes | None
    key_pem: bytes | None


_last: dict[TlsFiles, Loaded] = {}
"""Cache of the few files that a process uses."""


def load_or_last(files: TlsFiles) -> Loaded:
    """Read them, or return the cached contents while they are being replaced. Raises ConfigError."""
    try:
        return load(files)
    except ConfigError:
        if files not in _last:
            raise
        return _last[files]


def load(files: TlsFiles) -> Loaded:
    """Read them. Raises ConfigError: one cannot be read, is not PEM, or the key does not match the certificate."""
    ca_pem = _read(files.ca_file, files.ca_variable)
    cert_pem, key_pem = _read(files.cert_file, files.cert_variable), _read(files.key_file, files.key_variable)
    loaded = Loaded(
        authorities=_certificates(ca_pem, files.ca_file, files.ca_variable),
        chain=_certificates(cert_pem, files.cert_file, files.cert_variable),
        ca_pem=ca_pem,
        cert_pem=cert_pem,
        key_pem=key_pem,
    )
    if key_pem is not None and loaded.chain and _public_key(key_pem, files) != loaded.chain[0].public_key():
        raise ConfigError(
            f"{files.key_variable}: {files.key_file} is not the key of the certificate in {files.cert_file}; name two "
            "files that were made together"
        )
    _last[files] = loaded
    return loaded


class Followed(Generic[_Made]):
    """An object made from the files, made again when they change; thread-safe.

    Args:
        files: Which.
        make: Makes it from the files and their contents; raises ConfigError or OSError if they changed meanwhile.

    Raises:
        ConfigError, OSError: On first use only: they cannot be used, and this process has not read them before.
    """

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles, Loaded], _Made]) -> None:
        self._files, self._make = files, make
        self._lock = threading.Lock()
        self._state = _state(files)
        self._made = make(files, load_or_last(files))
        self._looked_s = time.monotonic()
        self._problem = ""

    def current(self) -> _Made:
        """The object made from the newest consistent files."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s < LOOK_EVERY_S:
                return self._made
            self._looked_s = now_s
            state = _state(self._files)
            if state != self._state:
                self._take(state)
            return self._made

    def _take(self, state: object) -> None:
        try:
            self._made = self._make(self._files, load(self._files))
        except (ConfigError, OSError) as error:
            if str(error) != self._problem:
                _log.warning("new certificate files are not taken yet; those before stay in use", error=str(error))
            self._problem = str(error)
            return
        # Their state before the read: changes made meanwhile are read at the next look.
        self._state, self._problem = state, ""
        _log.info("certificate files read again", files=[str(path) for path in self._files.paths])


def _state(files: TlsFiles) -> object:
    """Differs when one of the files does."""
    states = []
    for path in files.paths:
        try:
            found = path.stat()
            states.append((found.st_mtime_ns, found.st_ino, found.st_size))
        except OSError:
            states.append((0, 0, 0))
    return states


def _read(path: Path | None, variable: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        fix = "let this process's user read it" if isinstance(error, PermissionError) else "name an existing file"
        raise ConfigError(f"{variable}: {path} cannot be read: {error.strerror or error}; {fix}") from error


def _certificates(pem: bytes | None, path: Path | None, variable: str) -> tuple[x509.Certificate, ...]:
    if pem is None:
        return ()
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError as error:
        what = "is empty" if not pem.strip() else "holds no certificate in PEM form"
        raise ConfigError(f"{variable}: {path} {what}; it begins with -----BEGIN CERTIFICATE-----") from error


def _public_key(pem: bytes, files: TlsFiles) -> PublicKeyTypes:
    try:
        return load_pem_private_key(pem, password=None).public_key()
    except TypeError as error:
        raise ConfigError(
            f"{files.key_variable}: {files.key_file} is encrypted; store the key without a password"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{files.key_variable}: {files.key_file} holds no private key in PEM form; name the key's file"
        ) from error
