"""Reads the settings of reward models: from the section `reward` of a run, a reward worker, or any other file."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from console.config.data_section import run_reward, source_rewards
from penstock.config import ConfigError, StrictModel, read_document, validate
from penstock.security import NO_SECURITY, Security
from services.reward.config import RewardModelConfig

SUFFIXES = (".yaml", ".yml")


class RewardDocument(StrictModel):
    """What of a file says how samples are scored."""

    reward: RewardModelConfig
    sources: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """Rewards of sources that have their own, by the source's name."""


def read_reward_settings(path: Path) -> RewardDocument:
    """The rewards of a file: its section `reward`, and those of its sources. Raises ConfigError."""
    document = read_document(path)
    reward = run_reward(document)
    if not reward and "reward" not in document:
        raise ConfigError(f"{path}: has no section reward; name the configuration of a run, or a reward model")
    data = document.get("data")
    sources = document.get("sources") or source_rewards(data if isinstance(data, dict) else {})
    return validate(RewardDocument, {"reward": reward, "sources": sources}, source=str(path))


def own_security(config: RewardModelConfig) -> Security:
    """What a command that scores shows the run's own services; nothing where it calls none. Raises ConfigError."""
    return Security.from_environment() if config.calls_sandboxes else NO_SECURITY
