"""Checks the listen addresses of the services that a run starts: which ones others could reach in plain text."""

from __future__ import annotations

from console.config.config import RunConfig
from penstock.security import Security
from penstock.security.plain_text import is_local, plain_listener_warning

_LOOPBACK = "127.0.0.1:0"


def listener_problems(config: RunConfig, security: Security) -> list[str]:
    """Reasons not to start, one line each."""
    listeners = local_listeners(config)
    problem = security.listener_problem(_LOOPBACK, setting="listen") if listeners else None
    if problem is not None:
        return [problem]
    found = (security.listener_problem(address, setting=setting) for setting, address in listeners.items() if address)
    return [problem for problem in found if problem is not None]


def listener_warnings(config: RunConfig, security: Security) -> list[str]:
    """Exposed listeners that are allowed nevertheless, one line each."""
    if security.serves_tls or not security.allows_plain:
        return []
    return [
        f"{setting}: {plain_listener_warning(address)}"
        for setting, address in local_listeners(config).items()
        if address is not None and not is_local(address)
    ]


def local_listeners(config: RunConfig) -> dict[str, str | None]:
    """Addresses of the services started here, by setting; None is a free port of loopback."""
    elsewhere = {**dict(config.endpoints), "weights": config.endpoints.trainer}
    names = [name for name in ("broker", "scheduler", "reward", "trainer", "weights") if elsewhere[name] is None]
    found = {f"listen.{name}": getattr(config.listen, name) for name in names}
    if config.starts_generators and config.generator.openai_listen is not None:
        found["generator.openai_listen"] = config.generator.openai_listen
    return found
