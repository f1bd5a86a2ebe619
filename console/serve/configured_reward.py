"""Checks the reward model of a configuration by using it: `penstock reward check MY.yaml`."""

from __future__ import annotations

from console.config.reward_settings import own_security
from penstock.config import ConfigError
from penstock.rewards import ModelAwayError, RewardLoadError, RewardModel
from penstock.rewards.check import check_server
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.rewards.verdicts import CheckResult, CheckStatus
from penstock.security import Security
from penstock.security.credentials import JUDGES
from services.reward.canaries.known import read_canaries
from services.reward.canaries.watch import drifts_of
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool

PASSED, FAILED = CheckStatus.PASSED, CheckStatus.FAILED


async def check_configured(config: RewardModelConfig) -> list[CheckResult]:
    """Build it, have it answer, and score its canaries; checks after one that failed are left out."""
    judges = Security.from_environment(JUDGES)
    if not config.parts and config.model.startswith(THIRD_PARTY):
        results = await check_server(config.model.removeprefix(THIRD_PARTY), security=judges)
        if any(result.status is FAILED for result in results):
            return results
    else:
        results = []
    try:
        model = build_model(config, judges=judges, security=own_security(config))
    except RewardLoadError as error:
        return [*results, CheckResult(name="loads", status=FAILED, detail=str(error))]
    try:
        results.append(CheckResult(name="loads", status=PASSED, detail=model.name))
        results.append(await _answers(model))
        if config.canaries is not None and results[-1].status is PASSED:
            results.append(await _canaries(model, config))
        return results
    finally:
        await model.close()


async def _answers(model: RewardModel) -> CheckResult:
    try:
        found = await model.check()
        await model.probe()
    except (RewardLoadError, ModelAwayError) as error:
        return CheckResult(name="answers", status=FAILED, detail=str(error))
    return CheckResult(name="answers", status=PASSED, detail=found)


async def _canaries(model: RewardModel, config: RewardModelConfig) -> CheckResult:
    assert config.canaries is not None
    try:
        canaries = read_canaries(config.canaries)
    except ConfigError as error:
        return CheckResult(name="canaries", status=FAILED, detail=str(error))
    pool = ScoringPool(model=model, config=config.model_copy(update={"canaries": None}))
    drifts = await drifts_of(canaries, pool.score)
    if drifts:
        return CheckResult(name="canaries", status=FAILED, detail="; ".join(drifts[:8]))
    return CheckResult(name="canaries", status=PASSED, detail=f"{len(canaries)} are scored as known")
