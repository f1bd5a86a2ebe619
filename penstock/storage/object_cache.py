"""Copies of stored folders and files on this machine's disk, made once for all of its processes.

    ROOT/KEY.lock                  shared by every process that uses the copy, exclusive while it is deleted
    ROOT/KEY/making                locked by the process that makes the copy
    ROOT/KEY/content/NAME[/...]    the content, under the last name of its address
    ROOT/KEY/INDEX.json            digests; written last: a copy without it is continued file by file

KEY is made from the address and from what the storage lists there, so changed content is another copy. Promises:

- A copy is returned when each file has its digest: the manifest's if there is one (`manifest`), else that of the
  download. What was changed or damaged on the disk since is fetched again.
- A copy that a process uses stays until that process ends; others are deleted, the least recently used first, for
  the sake of new ones.
- A transfer that lasts over two seconds says how far it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from penstock.config import ConfigError
from penstock.process.disk import folder_bytes, free_bytes, is_full
from penstock.process.durable_files import replace_file, sync_file
from penstock.process.logger import get_logger
from penstock.storage.addresses import Address, last_name
from penstock.storage.manifest import MANIFEST_NAME, ManifestError, manifest_text, read_manifest
from penstock.storage.storage import FileDigest, Storage, StorageError, StoredFile, digest_of

MAX_BYTES_VARIABLE = "PENSTOCK_CACHE_BYTES"
DEFAULT_MAX_BYTES = 256 * 1024**3
SPARE_BYTES = 256 * 1024**2
"""What stays free of the disk."""
_NUM_STREAMS = 4
_FIRST_REPORT_S, _REPORT_EVERY_S = 2.0, 10.0
_INDEX = "INDEX.json"
_log = get_logger()


class ObjectCache:
    """The copies below one folder.

    Args:
        root: Made when needed.
        max_bytes: Of all copies together.
    """

    def __init__(self, root: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._locks: dict[str, int] = {}
        """Descriptors of the copies that this process uses, by key; closed when it ends."""

    @classmethod
    def of_user(cls) -> ObjectCache:
        """The one in $XDG_CACHE_HOME/penstock, of at most $PENSTOCK_CACHE_BYTES bytes. Raises ConfigError."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        stated = os.environ.get(MAX_BYTES_VARIABLE, str(DEFAULT_MAX_BYTES))
        if not stated.isdecimal() or int(stated) < 1:
            raise ConfigError(f"{MAX_BYTES_VARIABLE}: {stated!r:.100} is not a number of bytes above 0")
        return cls(Path(home) / "penstock" / "objects", max_bytes=int(stated))

    def close(self) -> None:
        """Use none of the copies any more; the end of the process does the same."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def fetch(
        self,
        address: Address,
        *,
        wanted: Callable[[str], bool] = lambda _: True,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> Path:
        """The copy of what lies at an address now.

        Args:
            address: A folder or one file.
            wanted: By its name below the address, whether a file is copied.
            is_given_up: Asked now and then; ends a transfer with StorageError.

        Raises:
            ConfigError: There is nothing to copy, this process may not read it, or it does not fit.
            OSError: The storage failed (StorageError), or this machine's disk did.
        """
        storage = Storage(address)
        files = {name: file for name, file in storage.list().items() if not name or wanted(name)}
        if not files:
            raise ConfigError(f"{address}: holds none of the files that are needed")
        key = _key(address, files)
        self._use(key)
        try:
            return self._copied(storage, files, self._root / key, is_given_up)
        except OSError as error:
            if is_full(error):
                raise ConfigError(f"{address}: the disk of {self._root} is full; free some space") from error
            raise

    def _copied(
        self,
        storage: Storage,
        files: Mapping[str, StoredFile],
        folder: Path,
        is_given_up: Callable[[], bool],
    ) -> Path:
        content = folder / "content" / last_name(storage.address)
        paths = {name: content / name for name in files}
        stated = _stated(storage, files)
        os.utime(folder)
        if not self._missing(folder, files, paths, stated):
            return content
        with (folder / "making").open("w") as making:
            fcntl.flock(making, fcntl.LOCK_EX)
            # Meanwhile another process may have made it.
            missing = self._missing(folder, files, paths, stated)
            self._make_room(sum(files[name].size_bytes for name in missing), storage.address)
            transfer = _Transfer(storage, files, folder / "incoming", stated, is_given_up)
            digests = _known(folder) | transfer.run({name: paths[name] for name in missing})
            # Of what an interrupted transfer left: it was moved to its place whole.
            digests |= {name: digest_of(path) for name, path in paths.items() if name not in digests}
            replace_file(folder / _INDEX, manifest_text(digests))
        _log.info("fetched", address=storage.address, num_files=len(missing), digest=tree_digest(digests))
        return content

    def _missing(
        self,
        folder: Path,
        files: Mapping[str, StoredFile],
        paths: Mapping[str, Path],
        stated: Mapping[str, FileDigest],
    ) -> list[str]:
        """Names of the files that are not there as they must be; of a copy without index at least one."""
        known = _known(folder)
        digests = {**known, **stated}
        missing = [name for name, path in paths.items() if not _is_whole(path, files[name], digests.get(name))]
        return missing or list(files.keys() - known.keys())[:1]

    def _use(self, key: str) -> None:
        """Keep others from deleting the copy, of which there may be nothing yet."""
        if key in self._locks:
            return
        try:
            # Others must not be able to change what is read from here.
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"{self._root}: the cache cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder that this "
                "process may write to"
            ) from error
        path = self._root / f"{key}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # The process that deletes a copy deletes its lock file, too.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    break
            os.close(descriptor)
        (self._root / key).mkdir(exist_ok=True)
        self._locks[key] = descriptor

    def _make_room(self, needed: int, address: Address) -> None:
        """Delete copies out of use until there is room; raises ConfigError."""
        sizes = {folder: folder_bytes(folder) for folder in self._root.iterdir() if folder.is_dir()}
        for folder in sorted(sizes, key=_last_use_s):
            if self._lacks(needed, sum(sizes.values())) and self._delete(folder):
                del sizes[folder]
        if lack := self._lacks(needed, sum(sizes.values())):
            raise ConfigError(
                f"{address}: {_mb(needed)} do not fit in {self._root}: {lack}; free some space, raise "
                f"{MAX_BYTES_VARIABLE}, or set XDG_CACHE_HOME to a folder on a larger disk"
            )

    def _lacks(self, needed: int, used: int) -> str:
        if needed + used > self._max_bytes:
            return f"{_mb(used)} of {_mb(self._max_bytes)} are in use"
        free = free_bytes(self._root)
        return f"{_mb(free)} of its disk are free" if needed + SPARE_BYTES > free else ""

    def _delete(self, folder: Path) -> bool:
        """Delete a copy unless a process uses it."""
        path = self._root / f"{folder.name}.lock"
        if folder.name in self._locks:
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Others delete as well.
            shutil.rmtree(folder, ignore_errors=True)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        _log.info("deleted a copy for the sake of a newer one", folder=str(folder))
        return not folder.exists()


class _Transfer:
    """Files on their way into one copy."""

    def __init__(
        self,
        storage: Storage,
        files: Mapping[str, StoredFile],
        incoming: Path,
        stated: Mapping[str, FileDigest],
        is_given_up: Callable[[], bool],
    ) -> None:
        self._is_given_up = is_given_up
        self._storage = storage
        self._files = files
        self._incoming = incoming
        self._stated = stated
        self._arrived: dict[str, int] = {}
        self._begun_s = time.monotonic()
        self._report_s = self._begun_s + _FIRST_REPORT_S
        self._reporting = threading.Lock()

    def run(self, targets: Mapping[str, Path]) -> dict[str, FileDigest]:
        """Fetch them, several at once; returns their digests."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir()
        try:
            with ThreadPoolExecutor(_NUM_STREAMS, thread_name_prefix="fetch") as pool:
                found = pool.map(self._fetch, range(len(targets)), targets, targets.values())
                return dict(zip(targets, found, strict=True))
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)

    def _fetch(self, number: int, name: str, target: Path) -> FileDigest:
        self._report(name, 0)
        temporary = self._incoming / str(number)
        self._storage.download(name, temporary, on_bytes=lambda so_far: self._report(name, so_far))
        digest, expected = digest_of(temporary), self._files[name].size_bytes
        if digest.size_bytes != expected:
            raise StorageError(
                f"{self._storage.address}: {name} has {digest.size_bytes} bytes, {expected} were listed; it changes"
            )
        if self._stated.get(name, digest) != digest:
            raise ConfigError(
                f"{self._storage.address}/{name}: is not the file that {MANIFEST_NAME} describes; upload it again"
            )
        sync_file(temporary)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(target)
        self._report(name, expected)
        return digest

    def _report(self, name: str, num_bytes: int) -> None:
        if self._is_given_up():
            raise StorageError(f"{self._storage.address}: given up while {name} was fetched")
        with self._reporting:
            self._arrived[name] = num_bytes
            now_s = time.monotonic()
            if now_s < self._report_s:
                return
            self._report_s = now_s + _REPORT_EVERY_S
            done, total = sum(self._arrived.values()), sum(file.size_bytes for file in self._files.values())
        mb_per_s = round(done / 1e6 / (now_s - self._begun_s), 1)
        _log.info("fetching", address=self._storage.address, mb=done // 10**6, of_mb=total // 10**6, mb_per_s=mb_per_s)


def content_digest(copy: Path) -> str:
    """The digest of all that `ObjectCache.fetch` copied; raises OSError, ManifestError."""
    return tree_digest(read_manifest((copy.parent.parent / _INDEX).read_text(encoding="utf-8")))


def tree_digest(files: Mapping[str, FileDigest]) -> str:
    """BLAKE3 of several files, hexadecimal: of their names, sizes and digests."""
    return blake3(manifest_text(files).encode()).hexdigest()


def _key(address: Address, files: Mapping[str, StoredFile]) -> str:
    listing = [f"{name}\0{file.size_bytes}\0{file.version}" for name, file in sorted(files.items())]
    return blake3("\0\0".join([address, *listing]).encode()).hexdigest(length=16)


def _is_whole(path: Path, file: StoredFile, digest: FileDigest | None) -> bool:
    """Whether a file is there and, if its digest is known, unchanged; without, it was moved here whole."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return digest is None or digest_of(path) == digest


def _known(folder: Path) -> dict[str, FileDigest]:
    """The index of a copy; empty if it was not whole yet."""
    try:
        return read_manifest((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ManifestError):
        return {}


def _stated(storage: Storage, files: Mapping[str, StoredFile]) -> dict[str, FileDigest]:
    """The digests that the folder's manifest states; empty without one."""
    if MANIFEST_NAME not in files:
        return {}
    try:
        return read_manifest(storage.read(MANIFEST_NAME) or b"")
    except ManifestError as error:
        raise ConfigError(f"{storage.address}/{MANIFEST_NAME}: {error}") from error


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _last_use_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
