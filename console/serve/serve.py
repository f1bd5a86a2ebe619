"""Implements `penstock serve`: one service in this process, with its own configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, get_args

import uvloop

from console.launch.parent_watch import watch_launcher
from penstock.config import ConfigError, StrictModel, apply_overrides, read_document, validate
from penstock.network.rpc import PortUnavailableError
from penstock.process.log_setup import LogFormat, configure_logging

LogLevel = Literal["debug", "info", "warning", "error"]


class ServiceKind(StrEnum):
    """The services."""

    BROKER = "broker"
    GENERATOR = "generator"
    REWARD = "reward"
    TRAINER = "trainer"
    SCHEDULER = "scheduler"


def serve_command(
    kind: str,
    path: Path | None,
    overrides: Iterable[str],
    *,
    listen: str | None,
    name: str | None,
    level: str,
    log_format: str,
) -> None:
    """Load the configuration and serve. Raises ConfigError."""
    service = _choice(kind, [one.value for one in ServiceKind], "service")
    config = load_service_config(ServiceKind(service), path, overrides, listen=listen)
    serve_service(
        ServiceKind(service),
        config,
        name=name or service,
        level=_choice(level, get_args(LogLevel), "--log-level"),
        log_format=_choice(log_format, get_args(LogFormat), "--log-format"),
    )


def load_service_config(
    kind: ServiceKind, path: Path | None, overrides: Iterable[str], *, listen: str | None
) -> StrictModel:
    """The configuration of a service from a file (None: all defaults) and overrides. Raises ConfigError."""
    document = apply_overrides(read_document(path) if path is not None else {}, overrides)
    if listen is not None:
        document["listen"] = listen
    return validate(_config_model(kind), document, source=str(path or f"serve {kind.value}"))


def serve_service(kind: ServiceKind, config: StrictModel, *, name: str, level: str, log_format: str) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError if its address cannot be listened on."""
    configure_logging(name, level=level, log_format="json" if log_format == "json" else "text")
    # torch and vLLM write to any stream; a line cut by a crash is better than a lost one.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    watch_launcher(os.environ)
    serve = _entry(kind)
    try:
        uvloop.run(_awaited(serve, config))
    except PortUnavailableError as error:
        raise ConfigError(f"listen: {error}") from error


def _choice(value: str, choices: Sequence[str], what: str) -> str:
    if value not in choices:
        raise ConfigError(f"{what} {value!r}: must be one of {', '.join(choices)}")
    return value


async def _awaited(serve: Callable[[Any], Awaitable[None]], config: StrictModel) -> None:
    await serve(config)


# Each service is imported only in its own process: most of them must run where torch is not installed.


def _config_model(kind: ServiceKind) -> type[StrictModel]:
    model: type[StrictModel] = resolve_name(f"services.{kind}.config:{kind.title()}Config")
    return model


def _entry(kind: ServiceKind) -> Callable[[Any], Awaitable[None]]:
    serve: Callable[[Any], Awaitable[None]] = resolve_name(f"services.{kind}.server:serve")
    return serve
