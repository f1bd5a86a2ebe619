"""The shared package's logs: a library in any process, it never writes to stdout by itself.

Where the process has configured structlog, as every service does, that says what becomes of them; else they go to the
standard library's logger "penstock".
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

_STANDARD = structlog.wrap_logger(
    logging.getLogger("penstock"),
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback),
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class _Logger:
    """Decides at each call, since a process configures structlog after its imports."""

    def __getattr__(self, name: str) -> Any:
        return getattr(structlog.get_logger() if structlog.is_configured() else _STANDARD, name)


def get_logger() -> Any:
    """What a module of the shared package logs to, as structlog's loggers are used."""
    return _Logger()
