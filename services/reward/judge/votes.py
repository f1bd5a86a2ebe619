"""Joins the votes on one sample: the median of each criterion; for a comparison, the majority."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from penstock.rewards import RewardResult, ScoreStatus
from services.reward.judge.config import JudgeConfig
from services.reward.judge.verdicts import SAME, UnusableAnswerError, Verdict


def joined(votes: Sequence[Verdict | UnusableAnswerError], config: JudgeConfig) -> RewardResult:
    """The result of these votes, of which JUDGE_ERROR says that too few can be used."""
    usable = [vote for vote in votes if isinstance(vote, Verdict)]
    errors = [vote for vote in votes if isinstance(vote, UnusableAnswerError)]
    if len(usable) < config.least_votes:
        message = f"{len(usable)} of {len(votes)} votes can be used, {config.least_votes} are needed: {errors[-1]}"
        return RewardResult(status=ScoreStatus.JUDGE_ERROR, message=message)
    scores = {name: float(median(vote.scores[name] for vote in usable)) for name in usable[0].scores}
    if not config.rubric and scores[SAME] not in (0.0, 1.0):
        return RewardResult(status=ScoreStatus.ABSTAINED, message=f"{len(usable)} votes are a tie")
    return RewardResult(sum(scores.values()) / len(scores), scores)
