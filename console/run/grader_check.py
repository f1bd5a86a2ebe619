"""Checks what a reward model needs beside its code: a judge that answers, canaries that can be read."""

from __future__ import annotations

from penstock.config import ConfigError
from penstock.rewards import ModelAwayError, RewardLoadError
from penstock.security import Security
from penstock.security.credentials import JUDGES
from services.reward.canaries.known import read_canaries
from services.reward.config import ModelConfig, RewardModelConfig
from services.reward.models.build import build_model

JUDGE = "judge"


async def grader_problems(reward: RewardModelConfig, *, is_insecure: bool) -> list[str]:
    """One line for each reason why samples could not be scored."""
    problems = []
    if reward.canaries is not None:
        try:
            read_canaries(reward.canaries)
        except ConfigError as error:
            problems.append(str(error))
    for each in reward.models:
        if each.model == JUDGE:
            problems += await _judge_problems(each, is_insecure=is_insecure)
    return problems


async def _judge_problems(config: ModelConfig, *, is_insecure: bool) -> list[str]:
    alone = RewardModelConfig(model=JUDGE, judge=config.judge)
    try:
        model = build_model(alone, judges=Security.from_environment(JUDGES, insecure=is_insecure))
    except RewardLoadError as error:
        return [f"reward.judge: {error}"]
    try:
        await model.check()
    except (RewardLoadError, ModelAwayError) as error:
        return [f"reward.judge: {error}"]
    finally:
        await model.close()
    return []
