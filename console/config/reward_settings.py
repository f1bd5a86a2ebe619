"""Reads the settings of a reward model: from the section `reward` of a run, a reward worker, or any other file."""

from __future__ import annotations

from pathlib import Path

from penstock.config import ConfigError, StrictModel, read_document, validate
from services.reward.config import RewardModelConfig

SUFFIXES = (".yaml", ".yml")


class RewardDocument(StrictModel):
    """A file with a section `reward`; others are ignored before it is made."""

    reward: RewardModelConfig


def read_reward_settings(path: Path) -> RewardModelConfig:
    """The section `reward` of a file. Raises ConfigError."""
    document = read_document(path)
    if "reward" not in document:
        raise ConfigError(f"{path}: has no section reward; name the configuration of a run, or a reward model")
    return validate(RewardDocument, {"reward": document["reward"]}, source=str(path)).reward
