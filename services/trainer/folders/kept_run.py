"""Keeps a trainer's run on disk, so that a restarted trainer continues it automatically.

Promises:

- What StartRun accepted survives any crash until it is cleared: the file is replaced as a whole and synced.
- It holds the content of StartRun, which has no secrets, and how often the run has begun since its last step.
- A run that ends without a step restarts with growing delays, never in a hot loop.
- It names the owner under which this trainer last worked on the run, so that a resume does not take the run away from a
  trainer that has taken it over since.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from penstock.process.durable_files import replace_file

FORMAT_VERSION = 1
FIRST_RETRY_S, MOST_RETRY_S = 10.0, 1800.0
MAX_BYTES = 4 * 1024 * 1024
"""Limit of a file that is read: more than StartRun accepts."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A StartRun request, and how its attempts ended."""

    run_id: str
    """Names the run."""
    config_json: str
    """Its configuration, as accepted."""
    num_begins: int
    """Times that it has begun since its last step."""
    problem: str = ""
    """Why it ended last; empty when that is not known."""
    owner_id: str = ""
    """Owner under which this trainer last took over the run, or was about to; empty before the first take-over."""
    epoch: int = 0
    """The newest epoch known to this trainer when it last worked on the run."""


class KeptRun:
    """The file of one trainer; without a path nothing is kept.

    Args:
        path: The file; its folder is made when needed.
        first_retry_s: Shortest delay before a failed run restarts.
    """

    def __init__(self, path: Path | None = None, *, first_retry_s: float = FIRST_RETRY_S) -> None:
        self._path = path
        self._kept: Kept | None = None
        self._first_retry_s = first_retry_s

    @property
    def is_kept(self) -> bool:
        """Whether there is a place to keep runs in."""
        return self._path is not None

    def read(self) -> Kept | None:
        """The kept run; None if there is none, or it cannot be read."""
        if self._path is None or not self._path.exists():
            return None
        try:
            if self._path.stat().st_size > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES} bytes")
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document.pop("format_version") != FORMAT_VERSION:
                raise ValueError("of another version of Penstock")
            kept = Kept(**document)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.error("the kept run cannot be read and is left aside", path=str(self._path), error=str(error))
            return None
        self._kept = kept
        return kept

    @property
    def present(self) -> Kept:
        """The run last read or written, which must not have been cleared since."""
        assert self._kept is not None
        return self._kept

    def update(self, **changes: Any) -> None:
        """Change these fields of the kept run."""
        self.write(replace(self.present, **changes))

    def write(self, kept: Kept) -> None:
        """Keep a run; if writing fails, the run continues but is not kept."""
        self._kept = kept
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            document = {"format_version": FORMAT_VERSION, **asdict(kept)}
            replace_file(self._path, json.dumps(document), mode=0o600)
        except OSError as error:
            _log.error("the run is not kept: a restarted trainer will wait for StartRun", error=str(error))

    def clear(self) -> None:
        """Forget the run."""
        self._kept = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def delay_s(self, num_begins: int) -> float:
        """Delay before a restart of a run, by the number of restarts since its last step; 0 for none."""
        if num_begins <= 0:
            return 0.0
        return float(min(MOST_RETRY_S, self._first_retry_s * 2 ** min(num_begins - 1, 32)))


def kept_path(state_dir: Path | None, listen: str) -> Path | None:
    """The file of the trainer that listens there; None if nothing is to be kept.

    A port chosen by the system differs after a restart, so what such a trainer kept would never be found.
    """
    port = listen.rpartition(":")[2]
    return None if state_dir is None or port in ("", "0") else state_dir.expanduser() / f"trainer-{port}.json"
