"""Logs and metrics of a process: structlog lines on stderr, Prometheus numbers over HTTP."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from prometheus_client import start_http_server

LogFormat = Literal["text", "json"]


def configure_logging(service: str, *, level: str = "info", log_format: LogFormat = "text") -> None:
    """Send this process's logs to stderr, each line naming the service; call once, first thing."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        # Loggers are made at each call: whoever replaces stderr or the configuration meanwhile is heard.
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)


def serve_metrics(port: int | None, *, host: str = "127.0.0.1") -> None:
    """Offer this process's Prometheus metrics at http://host:port/metrics; nothing when `port` is None."""
    if port is not None:
        start_http_server(port, addr=host)
