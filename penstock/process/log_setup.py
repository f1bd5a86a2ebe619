"""Logs of a process: structlog lines on stderr."""

from __future__ import annotations

import logging
from typing import Any, Literal

import structlog

from penstock.process.log_limits import LIBRARY, BoundedLines, GuardedStderr
from penstock.tracing.context import current

LogFormat = Literal["text", "json"]


def configure_logging(service: str, *, run_id: str = "", level: str = "info", log_format: LogFormat = "text") -> None:
    """Send this process's logs to stderr, each line naming the service, and its run if it has one; call once, first.

    Lines about a call or a piece of work that is traced have its `trace_id`; those about a sample `group_id` and
    `sample_index`.

    Log records of libraries (aiohttp, grpc, asyncio) go the same way from warnings on, bounded by `log_limits`.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    output = GuardedStderr()
    process = {"service": service, **({"run_id": run_id} if run_id else {})}

    def add_process(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # Not by context variables, which threads of an executor do not have.
        return {**process, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_process,
            _add_trace,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            BoundedLines([structlog.processors.format_exc_info, renderer]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: output,
        # Loggers are made at each call, so that a later change of the configuration takes effect.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, _LibraryHandler)]
    root.addHandler(_LibraryHandler(logging.WARNING))


def _add_trace(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    context = current()
    if context is not None:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


class _LibraryHandler(logging.Handler):
    """Hands records of the standard library's loggers to structlog; never raises."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it as a line of this process."""
        try:
            fields: dict[str, Any] = {LIBRARY: record.name, "exc_info": record.exc_info}
            structlog.get_logger().log(record.levelno, record.getMessage(), **fields)
        except Exception:  # a library's own call must not fail by it
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a record that cannot be logged."""
