"""Writes the file of `--picture`, and says before the work whether it can be."""

from __future__ import annotations

from pathlib import Path

from penstock.config import ConfigError


def check_picture(path: Path | None) -> None:
    """Raise ConfigError if it names a folder, or a file in none."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--picture: {path}: no file of an existing folder; name one, such as plan.svg")


def write_picture(path: Path, svg: str) -> None:
    """Write it. Raises ConfigError."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--picture: {path}: {error.strerror}; name a file that can be written") from error
