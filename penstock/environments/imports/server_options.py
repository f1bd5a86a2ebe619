"""Checks what names of environments say about servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


def http_address(address: str) -> str:
    """The address of an HTTP server, without a slash at its end. Raises ValueError."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname or parts.username:
        raise ValueError("the address must be http://HOST:PORT or ws://HOST:PORT, without a password")
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def checked_timeout(options: Mapping[str, Any]) -> float:
    """The option `timeout_s`, 60 s if it is not set. Raises ValueError."""
    timeout_s = options.get("timeout_s", 60.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 3600:
        raise ValueError(f"timeout_s: {timeout_s!r}; must be above 0 and at most 3600")
    return float(timeout_s)
