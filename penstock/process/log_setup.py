"""Logs of a process: structlog lines on stderr."""

from __future__ import annotations

import logging
from typing import Any, Literal

import structlog

from penstock.process.log_limits import SOURCE, BoundedLines, GuardedStderr

LogFormat = Literal["text", "json"]


def configure_logging(service: str, *, level: str = "info", log_format: LogFormat = "text") -> None:
    """Send this process's logs to stderr, each line naming the service; call once, first thing.

    Log records of libraries (aiohttp, grpc, asyncio) go the same way from warnings on, bounded by `log_limits`.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    output = GuardedStderr()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            BoundedLines([structlog.processors.format_exc_info, renderer]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: output,
        # Loggers are made at each call, so that a later change of the configuration takes effect.
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, _LibraryHandler)]
    root.addHandler(_LibraryHandler(logging.WARNING))


class _LibraryHandler(logging.Handler):
    """Hands records of the standard library's loggers to structlog; never raises."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it as a line of this process."""
        try:
            fields: dict[str, Any] = {SOURCE: record.name, "exc_info": record.exc_info}
            structlog.get_logger().log(record.levelno, record.getMessage(), **fields)
        except Exception:  # a library's own call must not fail by it
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a record that cannot be logged."""
