"""Counts engine failures under this generator's name, across the restarts that they cause.

The process of a failed engine ends before Prometheus reads it again, so a count of its own would never be seen. This
one is in the generator's cache folder, so it survives every restart. A process that ended without recording it (killed,
out of memory) is detected by the next one.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import structlog
from prometheus_client import Counter
from pydantic import Field, NonNegativeInt, ValidationError

from penstock.config import StrictModel
from penstock.process.durable_files import replace_file

_FILE = "failures.json"

_log = structlog.get_logger()


class Failure(StrEnum):
    """How an engine, or its whole process, ended."""

    FAILED = "failed"
    HUNG = "hung"
    KILLED = "killed"


class _Record(StrictModel):
    """The contents of the file."""

    counts: dict[Failure, NonNegativeInt] = Field(default_factory=dict)
    is_running: bool = False
    """Whether a process has begun and not recorded its end."""


class FailureCounts:
    """The failure log of one generator.

    Args:
        folder: Its own folder; created if missing. If it cannot be written, only this process is counted.
        metric: Counts by `how`.
    """

    def __init__(self, folder: Path, metric: Counter) -> None:
        self._path = folder / _FILE
        self._metric = metric
        self._record = _Record()

    def begin(self) -> None:
        """The process begins: take over the counts of former ones."""
        self._record = _read(self._path)
        for how in Failure:
            # Each from the start, zeros included: Prometheus sees no increase in a series that begins above zero.
            self._metric.labels(how).inc(self._record.counts.get(how, 0))
        if self._record.is_running:
            self._add(Failure.KILLED)
        self._write(is_running=True)

    def count(self, how: Failure) -> None:
        """The engine failed, which will end the process."""
        self._add(how)
        self._write(is_running=False)

    def end(self) -> None:
        """The process ends normally."""
        self._write(is_running=False)

    def _add(self, how: Failure) -> None:
        self._metric.labels(how).inc()
        counts = {**self._record.counts, how: self._record.counts.get(how, 0) + 1}
        self._record = self._record.model_copy(update={"counts": counts})

    def _write(self, *, is_running: bool) -> None:
        self._record = self._record.model_copy(update={"is_running": is_running})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, self._record.model_dump_json())
        except OSError as error:
            _log.warning("failures are not remembered", path=str(self._path), error=str(error))


def _read(path: Path) -> _Record:
    try:
        return _Record.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return _Record()
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        _log.warning("former failures cannot be read; counting begins at 0", path=str(path), error=str(error))
        return _Record()
