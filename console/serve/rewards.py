"""Implements `penstock reward serve`, `check` and `resolve`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import uvloop

from console.config.reward_settings import SUFFIXES, read_reward_settings
from console.serve.configured_reward import check_configured
from console.serve.typed_address import as_address
from penstock.config import ConfigError
from penstock.network.rpc import PortUnavailableError
from penstock.process.log_setup import configure_logging
from penstock.rewards import RewardLoadError, load_reward
from penstock.rewards.check import check_server
from penstock.rewards.serving import serve_async
from penstock.rewards.verdicts import CheckStatus
from penstock.security import Security
from penstock.security.credentials import JUDGES
from services.reward.models.build import check_name


def serve_reward(target: str, *, listen: str) -> None:
    """Serve a function until SIGTERM or SIGINT. Raises ConfigError."""
    configure_logging("reward-model")
    as_address(listen)
    try:
        uvloop.run(serve_async(target, listen=listen))
    except (RewardLoadError, PortUnavailableError) as error:
        raise ConfigError(str(error)) from error


def check_reward(target: str) -> int:
    """Print the verdict on a running reward model, or on that of a configuration; returns the exit status."""
    if target.endswith(SUFFIXES):
        configure_logging("console", level="error")
        results = asyncio.run(check_configured(read_reward_settings(Path(target)).reward))
    else:
        results = asyncio.run(check_server(as_address(target), security=Security.from_environment(JUDGES)))
    for result in results:
        print(f"{result.status.value:7} {result.name}{f': {result.detail}' if result.detail else ''}")
    has_failed = any(result.status is CheckStatus.FAILED for result in results)
    print(f"{target} {'does not conform' if has_failed else 'conforms'}")
    return 1 if has_failed else 0


def resolve_reward(models: Sequence[str]) -> None:
    """Load the Python objects that reward models' names refer to, if they are Python. Raises ConfigError."""
    try:
        for model in models:
            check_name(model)
            if ":" in model and "://" not in model:
                load_reward(model)
    except RewardLoadError as error:
        raise ConfigError(str(error)) from error
