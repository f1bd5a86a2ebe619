"""Implements `penstock env serve`, `check` and `resolve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import uvloop

from console.serve.serve import begin_logs
from console.serve.typed_address import as_address
from penstock import tracing
from penstock.config import ConfigError
from penstock.environments import EnvironmentLoadError, load_environment
from penstock.environments.check import check_server
from penstock.environments.serving import serve_async
from penstock.network.rpc import PortUnavailableError
from penstock.rewards.verdicts import CheckStatus
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.tracing.settings import run_of


def serve_environment(
    target: str,
    *,
    listen: str,
    metrics_listen: str | None,
    max_sessions: int,
    max_idle_s: float,
    level: str,
    log_format: str,
) -> None:
    """Serve a class until SIGTERM or SIGINT. Raises ConfigError."""
    begin_logs("environment", run_id=run_of(), level=level, log_format=log_format)
    tracing.configure("environment", instance="environment", run_id=run_of())
    for address in (listen, metrics_listen):
        if address is not None:
            as_address(address)
    try:
        uvloop.run(
            serve_async(
                target,
                listen=listen,
                metrics_listen=metrics_listen,
                max_sessions=max_sessions,
                max_idle_s=max_idle_s,
            )
        )
    except (EnvironmentLoadError, PortUnavailableError) as error:
        raise ConfigError(str(error)) from error


def check_environment(target: str, *, row: str, say: Sequence[str], run_id: str | None) -> int:
    """Print the verdict on a running environment; returns the exit status. Raises ConfigError.

    Without `run_id` it calls in the name of the run that the certificate shown is bound to, if any.
    """
    try:
        columns = json.loads(row)
    except ValueError as error:
        raise ConfigError(f"--row: not valid JSON: {error}") from error
    if not isinstance(columns, dict):
        raise ConfigError("--row: must be one JSON object")
    address, security = as_address(target), Security.from_environment(JUDGES)
    named = run_id or security.run_id or "check"
    results = asyncio.run(check_server(address, row=columns, say=say, run_id=named, security=security))
    for result in results:
        print(f"{result.status.value:7} {result.name}{f': {result.detail}' if result.detail else ''}")
    has_failed = any(result.status is CheckStatus.FAILED for result in results)
    print(f"{target} {'does not conform' if has_failed else 'conforms'}")
    return 1 if has_failed else 0


def resolve_environment(target: str) -> None:
    """Load the Python object that an environment's name refers to. Raises ConfigError."""
    try:
        load_environment(target)
    except EnvironmentLoadError as error:
        raise ConfigError(str(error)) from error
