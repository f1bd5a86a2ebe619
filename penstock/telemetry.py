"""Logs and metrics of a process: structlog lines on stderr, Prometheus numbers over HTTP."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog
from prometheus_client import start_http_server

from penstock.config import ConfigError
from penstock.log_limits import SOURCE, BoundedLines, GuardedStderr

LogFormat = Literal["text", "json"]

_log = structlog.get_logger()


def configure_logging(service: str, *, level: str = "info", log_format: LogFormat = "text") -> None:
    """Send this process's logs to stderr, each line naming the service; call once, first thing.

    What libraries log (aiohttp, grpc, asyncio) goes the same way, from warnings on: bounded as `log_limits` says.
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
        # Loggers are made at each call: whoever replaces the configuration meanwhile is heard.
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, _LibraryHandler)]
    root.addHandler(_LibraryHandler(logging.WARNING))


def serve_metrics(address: str | None) -> None:
    """Offer this process's Prometheus metrics at http://host:port/metrics; nothing when `address` is None.

    Raises:
        ConfigError: It cannot be listened on.
    """
    if address is None:
        return
    host, _, port = address.rpartition(":")
    try:
        server, _ = start_http_server(int(port), addr=host.strip("[]"))
    except OSError as error:
        raise ConfigError(f"metrics_listen: cannot listen on {address}: {error}") from error
    # socketserver would print the traceback of every connection that breaks.
    setattr(server, "handle_error", _note_broken_connection)  # noqa: B010 -- mypy refuses to assign a method


class _LibraryHandler(logging.Handler):
    """Hands what libraries log with the standard library's loggers to structlog; never raises."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it as a line of this process."""
        try:
            fields: dict[str, Any] = {SOURCE: record.name, "exc_info": record.exc_info}
            structlog.get_logger().log(record.levelno, record.getMessage(), **fields)
        except Exception:  # a library's own call must not fail by it
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a record that cannot be logged."""


def _note_broken_connection(_request: Any, client_address: Any) -> None:
    _log.info("a client of the metrics broke its connection off", client=client_address, error=repr(sys.exc_info()[1]))
