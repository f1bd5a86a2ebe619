"""Checks the listen addresses of the services that a run starts: which ones others could reach in plain text."""

from __future__ import annotations

from collections.abc import Mapping

from console.config.config import RunConfig
from penstock.security import Security
from penstock.security.plain_text import is_local, plain_listener_warning

_LOOPBACK = "127.0.0.1:0"


def listener_problems(config: RunConfig, security: Security) -> list[str]:
    """Reasons not to start, one line each."""
    listeners = _listeners(config)
    problem = security.listener_problem(_LOOPBACK, setting="listen") if listeners else None
    if problem is not None:
        return [problem]
    found = (security.listener_problem(address, setting=setting) for setting, address in listeners.items())
    return [problem for problem in found if problem is not None]


def listener_warnings(config: RunConfig, security: Security) -> list[str]:
    """Exposed listeners that are allowed nevertheless, one line each."""
    if security.serves_tls or not security.allows_plain:
        return []
    exposed = ((setting, address) for setting, address in _listeners(config).items() if not is_local(address))
    return [f"{setting}: {plain_listener_warning(address)}" for setting, address in exposed]


def _listeners(config: RunConfig) -> Mapping[str, str]:
    """Addresses of the services started here, by setting; an unset one is a free port of loopback."""
    listen, endpoints = config.listen, config.endpoints
    found: dict[str, str | None] = {}
    for name in ("broker", "scheduler", "reward", "trainer"):
        if getattr(endpoints, name) is None:
            found[f"listen.{name}"] = getattr(listen, name) or _LOOPBACK
    if endpoints.trainer is None:
        found["listen.weights"] = listen.weights
    if config.starts_generators:
        found["generator.openai_listen"] = config.generator.openai_listen
    return {setting: address for setting, address in found.items() if address is not None}
