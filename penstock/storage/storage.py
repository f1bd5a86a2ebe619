"""Files below an address in object storage, through fsspec: listed, read, written and deleted.

Promises:

- Nothing is cached: a listing is the storage's own at that moment.
- Errors are one line with the address: `StorageError` for what may go better later, ConfigError (a missing package,
  refused credentials, no such object) for what only a person can change.
- Credentials and endpoints come from the environment of this process, as each library documents, never from an address.

Calls block; they may be made in any thread.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.config import ConfigError
from penstock.process.disk import is_full
from penstock.storage.addresses import PACKAGES, Address, check_name, scheme_of

MAX_FILES = 100_000
MAX_SMALL_BYTES = 64 * 1024**2
_VERSION_KEYS = ("ETag", "etag", "generation", "mtime", "LastModified", "updated")
"""Names that storages give to an object's version, which changes with its content."""
_CREDENTIAL_ERRORS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "RefreshError")
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}},
    "gs": {},
    "file": {"auto_mkdir": True},
}


class StorageError(OSError):
    """The storage did not do what was asked, and might later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file as a storage lists it."""

    size_bytes: int
    version: str
    """Changes with the content, in the storage's own terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """What a file holds."""

    size_bytes: int
    blake3: str
    """Hexadecimal digits."""


def digest_of(path: Path) -> FileDigest:
    """Read a file; raises OSError."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return FileDigest(size_bytes=path.stat().st_size, blake3=hasher.hexdigest())


class Storage:
    """What lies below one address.

    Args:
        address: A folder, or one file.

    Raises:
        ConfigError: The package for its scheme is not installed.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        scheme = scheme_of(address)
        package = PACKAGES[scheme]
        for needed in filter(None, ("fsspec", package)):
            if importlib.util.find_spec(needed) is None:
                raise ConfigError(
                    f"{address}: needs the package {needed}, which is not installed; "
                    f"pip install 'penstock[{scheme}]', or use a path"
                )
        self._files = filesystem(scheme)

    def list(self) -> dict[str, StoredFile]:
        """The files by their names below the address; one that lies at the address itself by the empty name.

        Raises:
            StorageError, ConfigError: See above; there is nothing at the address.
        """
        with self._explained():
            found = self._files.find(self._path(), withdirs=False, detail=True)
        root = str(self._files._strip_protocol(self._path()))
        files: dict[str, StoredFile] = {}
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            # Some storages list an empty object for a folder.
            if info["type"] == "directory" or path.endswith("/"):
                continue
            if info["type"] != "file" or info.get("islink"):
                raise ConfigError(f"{self.address}: {name} is a link, or no file; put the file itself there")
            files[self._checked(name) if name else ""] = _stored_file(info)
            if len(files) > MAX_FILES:
                raise ConfigError(f"{self.address}: holds more than {MAX_FILES} files; name a folder further down")
        if not files:
            raise ConfigError(f"{self.address}: there is no such object or folder; check the name and the bucket")
        return files

    def names(self) -> frozenset[str]:
        """The names directly below the address, of files and folders; empty if there is nothing."""
        with self._explained():
            try:
                found = self._files.ls(self._path(), detail=False)
            except FileNotFoundError:
                return frozenset()
        return frozenset(Path(path.rstrip("/")).name for path in found)

    def read(self, name: str) -> bytes | None:
        """A small file; None if there is none. Raises StorageError, also for one that is too large."""
        with self._explained(name):
            try:
                if self._files.info(self._path(name))["size"] > MAX_SMALL_BYTES:
                    raise StorageError(f"{self.address}/{name}: larger than {MAX_SMALL_BYTES} bytes")
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> FileDigest:
        """Write a small file, whole or not at all where the storage can; returns its digest."""
        with self._explained(name):
            self._files.pipe_file(self._path(name), content)
        return FileDigest(size_bytes=len(content), blake3=blake3(content).hexdigest())

    def download(self, name: str, target: Path, *, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Copy a file to `target`, whose folder exists.

        Args:
            name: Below the address; empty for the file that lies at it.
            target: Replaced if it exists.
            on_bytes: Called with the number of bytes so far, now and then; not by every storage.

        Raises:
            OSError: StorageError, or the disk refused.
        """
        from fsspec.callbacks import Callback

        progress = Callback(hooks={"bytes": lambda size, value, **_: on_bytes(value)})
        with self._explained(name):
            self._files.get_file(self._path(name), str(target), callback=progress)

    def upload(self, source: Path, name: str) -> FileDigest:
        """Copy a file into the storage; returns its digest, computed from what was read of the disk."""
        digest = digest_of(source)
        with self._explained(name):
            self._files.put_file(str(source), self._path(name))
            size = int(self._files.info(self._path(name))["size"])
        if size != digest.size_bytes:
            raise StorageError(f"{self.address}/{name}: {size} bytes of {digest.size_bytes} arrived")
        return digest

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if there is none."""
        with self._explained(name):
            try:
                self._files.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def _checked(self, name: str) -> str:
        try:
            return check_name(name)
        except ValueError as error:
            raise ConfigError(f"{self.address}: {error}") from error

    def _path(self, name: str = "") -> str:
        return f"{self.address}/{check_name(name)}" if name else self.address

    @contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        """Words the errors of many libraries alike."""
        where = self._path(name)
        try:
            yield
        except (StorageError, ConfigError):
            raise
        except FileNotFoundError as error:
            raise ConfigError(f"{where}: there is no such object or bucket; check the name") from error
        except Exception as error:
            if is_full(error):
                raise
            if isinstance(error, PermissionError) or type(error).__name__ in _CREDENTIAL_ERRORS:
                raise ConfigError(
                    f"{where}: access is refused ({_one_line(error)}); {_CREDENTIALS[scheme_of(self.address)]}"
                ) from error
            raise StorageError(f"{where}: {_one_line(error)}") from error


@cache
def filesystem(scheme: str) -> Any:
    """Fsspec's client, made once a process: an S3 client alone takes a second of a core."""
    # Imported here: most processes read nothing from object storage.
    import fsspec

    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **_OPTIONS[scheme])


def _stored_file(info: Mapping[str, Any]) -> StoredFile:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
    return StoredFile(size_bytes=int(info["size"]), version=version)


_CREDENTIALS = {
    "s3": "give this process credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of its "
    "machine; AWS_ENDPOINT_URL for a server other than Amazon's",
    "gs": "give this process credentials: GOOGLE_APPLICATION_CREDENTIALS, or the account of its machine",
    "file": "let its user read and write that folder",
}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
