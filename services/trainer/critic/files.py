"""The small files of a critic, on a disk or in object storage (`penstock.storage.storage.Storage`)."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from penstock.process.durable_files import sync_folder


class Files(Protocol):
    """Files of one folder. Calls raise OSError; a storage's also ConfigError, which only a person can mend."""

    @property
    def address(self) -> str:
        """Of the folder, for messages."""

    def names(self) -> Collection[str]:
        """Of all files; empty if there is no such folder."""

    def read(self, name: str) -> bytes | None:
        """A file; None if there is none."""

    def write(self, name: str, content: bytes) -> object:
        """Store a file, whole or not at all."""

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""


class LocalFiles:
    """Those of a folder of this machine, made if missing; what a call did is on the disk when it returns."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def address(self) -> str:
        """Its path."""
        return str(self._folder)

    def names(self) -> Collection[str]:
        """Of all files."""
        return [path.name for path in self._folder.iterdir()]

    def read(self, name: str) -> bytes | None:
        """A file; None if there is none."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Store a file, whole or not at all."""
        temporary = self._folder / f".{name}"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self._folder / name).unlink(missing_ok=True)
        sync_folder(self._folder)
