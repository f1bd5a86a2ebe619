"""Watches for a notice that this machine will be taken away, and treats it as SIGTERM: everything drains on that.

    the notice file exists, or the cloud announces it  -->  SIGTERM to this process, once

A file that cannot be read and a metadata server that does not answer are no notice: they are logged when that begins.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config import ConfigError
from penstock.notices.metadata_server import CLOUDS, Announcement, plain_announcement
from penstock.process.logger import get_logger

LOOK_EVERY_S = 2.0
"""Clouds announce an end 30 s to 2 min ahead."""

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSources:
    """Where notices come from."""

    file: Path | None = None
    """A notice once it exists."""
    url: str | None = None
    """A notice once it answers with status 200; or the name of a cloud in CLOUDS."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what could never give a notice."""
        if self.file is not None and not self.file.parent.is_dir():
            raise ConfigError(
                f"--notice-file: {self.file}: there is no folder {self.file.parent}; create it, or name another file"
            )
        if self.url is None or self.url in CLOUDS:
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ConfigError(
                f"--notice-url: {self.url!r}; must be http://HOST/PATH or https://HOST/PATH without a user, "
                f"or one of {', '.join(CLOUDS)}"
            )

    def announcements(self) -> dict[str, Announcement]:
        """What to ask, by name."""
        found: dict[str, Announcement] = {}
        if self.file is not None:
            found[f"notice file {self.file}"] = self.file.exists
        if self.url is not None:
            found[f"notice url {self.url}"] = CLOUDS.get(self.url) or plain_announcement(self.url)
        return found


def heed(sources: NoticeSources, *, on_notice: Callable[[], None] | None = None) -> None:
    """Look for notices in a thread of their own, until the first one; call it once the process handles SIGTERM.

    Args:
        sources: Where to look; without any nothing is started.
        on_notice: Called in that thread instead of the signal.
    """
    announcements = sources.announcements()
    if announcements:
        act = on_notice or _terminate
        threading.Thread(target=_watch, args=(announcements, act), name="notices", daemon=True).start()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(announcements: dict[str, Announcement], act: Callable[[], None]) -> None:
    silent: set[str] = set()
    while True:
        for name, is_announced in announcements.items():
            try:
                if is_announced():
                    _log.warning("notice: this machine will be taken away; it drains", source=name)
                    act()
                    return
                silent.discard(name)
            except (OSError, ValueError) as error:
                if name not in silent:
                    _log.warning("no notices can be had; looking on", source=name, error=str(error))
                silent.add(name)
        time.sleep(LOOK_EVERY_S)
