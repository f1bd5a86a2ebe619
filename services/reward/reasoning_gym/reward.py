"""The score that reasoning_gym's own scorer of the row's task gives to the completion's answer.

The answer is the text between the last `<answer>` and `</answer>`, else behind the last `####`, else the completion.

Invariant: no answer reaches anything or blocks the service. Scorers of some tasks evaluate answers, so they run in a
sandbox and are ended at their deadline.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardResult, ScoreStatus
from penstock.security import NO_SECURITY, Security
from services.reward.code.config import CodeConfig
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.reasoning_gym.remote_scorers import RemoteScorers
from services.reward.reasoning_gym.scorers import Answer, LocalScorers, Scorers, row_fault

MAX_ANSWER_CHARACTERS = 16384
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_STATUSES = {
    "limit": ScoreStatus.CANDIDATE_LIMIT,
    "invalid": ScoreStatus.INVALID,
    "failed": ScoreStatus.FAILED,
    "error": ScoreStatus.SANDBOX_ERROR,
}
"""By the key of a worker's answer that is no value."""


class ReasoningGymReward(BatchReward):
    """Scores answers here or at a sandbox service."""

    name = "reasoning_gym"

    def __init__(self, config: CodeConfig, *, security: Security = NO_SECURITY) -> None:
        """`config` says which sandbox; `security` is what a sandbox service is shown.

        Raises RewardLoadError: no sandbox works here, or the package is missing.
        """
        self._scorers = _scorers(config, security)

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return await self.score_within(items, timeout_s=1e6)

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those not reached within `timeout_s` seconds time out.

        Raises ModelAwayError: the sandbox service is away.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        results = await asyncio.gather(*(self._score_one(item, deadline_s) for item in items), return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            raise errors[0]
        return [result for result in results if isinstance(result, RewardResult)]

    async def check(self) -> str:
        """Where answers are scored. Raises RewardLoadError and ModelAwayError."""
        return await self._scorers.check()

    async def probe(self) -> None:
        """Return when answers can be scored. Raises ModelAwayError."""
        await self._scorers.probe()

    async def close(self) -> None:
        """End child processes and connections."""
        await self._scorers.close()

    async def _score_one(self, item: RewardItem, deadline_s: float) -> RewardResult:
        spec: Any = item.metadata.get("reasoning_gym")
        if fault := row_fault(spec):
            return RewardResult(status=ScoreStatus.INVALID, message=fault)
        given = answer_of(item.completion)[:MAX_ANSWER_CHARACTERS]
        try:
            found = await self._scorers.score(
                Answer(row=spec, expected=item.answer, given=given), deadline_s=deadline_s
            )
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message="no score in time")
        return _result(found)


def _scorers(config: CodeConfig, security: Security) -> Scorers:
    if config.sandbox_service is not None:
        return RemoteScorers(config.sandbox_service, security=security)
    try:
        sandbox, _ = find_sandbox(config.sandbox)
    except SandboxError as error:
        raise RewardLoadError(f"reward 'reasoning_gym' needs a sandbox, and none works here: {error}") from error
    return LocalScorers(sandbox)


def answer_of(completion: str) -> str:
    """What a completion answers."""
    tagged = _TAGGED.findall(completion)
    return str(tagged[-1] if tagged else completion.rpartition("####")[2]).strip()


def _result(found: dict[str, Any]) -> RewardResult:
    if "value" in found:
        return RewardResult(found["value"])
    for key, status in _STATUSES.items():
        if key in found:
            return RewardResult(status=status, message=str(found[key]))
    return RewardResult(status=ScoreStatus.SANDBOX_ERROR, message="the process that scores gave no answer")
