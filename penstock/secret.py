"""Secrets of this process: from its environment, or from files that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.config import ConfigError

MAX_SECRET_BYTES = 64 * 1024


def read_secret(name: str) -> str | None:
    """The variable `name`, or the content of the file that `name`_FILE names, without white space around it.

    None when neither is set; what is empty counts as not set. Raises ConfigError.
    """
    value, path = os.environ.get(name), os.environ.get(f"{name}_FILE")
    if not path:
        return value or None
    if value:
        raise ConfigError(f"{name} and {name}_FILE are both set; leave one of them out")
    text = read_bounded(path, where=f"{name}_FILE").strip()
    if not text:
        raise ConfigError(f"{name}_FILE: {path} is empty; it holds the secret and nothing else")
    return text


def read_bounded(path: str, *, where: str) -> str:
    """The text of a file of at most MAX_SECRET_BYTES. Raises ConfigError; `where` says what names the file."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
        if len(content) > MAX_SECRET_BYTES:
            raise ConfigError(f"{where}: {path} is too long; it may have {MAX_SECRET_BYTES} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}; name a readable file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {path} is not text in UTF-8; name the file that holds the secret") from error
