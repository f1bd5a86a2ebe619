"""Implements `penstock serve`: one service in this process, with its own configuration."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar, get_args

import uvloop

from console.launch.supervisor import watch_launcher
from penstock import tracing
from penstock.config import ConfigError, StrictModel, apply_overrides, read_document, validate
from penstock.errors import BadTokenError, ForbiddenError
from penstock.memory.collector import collect_rarely
from penstock.network.rpc import PortUnavailableError
from penstock.notices.watch import NoticeSources, heed
from penstock.process.log_setup import LogFormat, configure_logging
from penstock.tracing.settings import run_of

LogLevel = Literal["debug", "info", "warning", "error"]
_Choice = TypeVar("_Choice", bound=str)


class ServiceKind(StrEnum):
    """The services."""

    BROKER = "broker"
    GENERATOR = "generator"
    REWARD = "reward"
    TRAINER = "trainer"
    SCHEDULER = "scheduler"
    SCORER = "scorer"
    CRITIC = "critic"
    SANDBOX = "sandbox"

    @property
    def package(self) -> str:
        """Where its configuration and its server are."""
        return f"services.{_INSIDE.get(self, '')}{self}"


_INSIDE = {ServiceKind.SCORER: "trainer.", ServiceKind.CRITIC: "trainer.", ServiceKind.SANDBOX: "reward."}
"""Of what services some are a part."""


def serve_command(
    kind: str,
    path: Path | None,
    overrides: Iterable[str],
    *,
    listen: str | None,
    name: str | None,
    level: str,
    log_format: str,
    notices: NoticeSources,
) -> None:
    """Load the configuration and serve until SIGTERM, SIGINT or a notice. Raises ConfigError, also if refused."""
    collect_rarely()
    service = _choice(kind, tuple(ServiceKind), "service")
    config = load_service_config(service, path, overrides, listen=listen)
    run_id = getattr(config, "run_id", "") or run_of()
    begin_logs(name or service, run_id=run_id, level=level, log_format=log_format)
    # torch and vLLM write to any stream; a line cut by a crash is better than a lost one.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    watch_launcher()
    # Without a name: on other machines, and in other containers, are others of its kind.
    tracing.configure(service.value, instance=name or f"{service}@{socket.gethostname()}", run_id=run_id)
    serve = _entry(service)
    heed(notices)
    try:
        uvloop.run(serve(config))
    except PortUnavailableError as error:
        raise ConfigError(f"listen: {error}") from error
    except (BadTokenError, ForbiddenError) as error:
        # Its credential is of another run or role, or was revoked: no restart helps.
        raise ConfigError(str(error)) from error


def begin_logs(service: str, *, run_id: str, level: str, log_format: str) -> None:
    """Set this process's logs up as its options say. Raises ConfigError."""
    configure_logging(
        service,
        run_id=run_id,
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


def _choice(value: str, choices: Sequence[_Choice], what: str) -> _Choice:
    found = next((choice for choice in choices if choice == value), None)
    if found is None:
        raise ConfigError(f"{what} {value!r}: must be one of {', '.join(choices)}")
    return found


# Each service is imported only in its own process: most of them must run where torch is not installed.


def _config_model(kind: ServiceKind) -> type[StrictModel]:
    model: type[StrictModel] = resolve_name(f"{kind.package}.config:{kind.title()}Config")
    return model


def _entry(kind: ServiceKind) -> Callable[[Any], Coroutine[Any, Any, None]]:
    serve: Callable[[Any], Coroutine[Any, Any, None]] = resolve_name(f"{kind.package}.server:serve")
    return serve
