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

from penstock.config import ConfigError
from penstock.reasoning_gym.source import MAX_ROWS, ReasoningGymSource, require_package
from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardResult, ScoreStatus
from services.reward.code.config import CodeConfig
from services.reward.code.sandbox import SandboxError
from services.reward.code.sandboxes import find_sandbox
from services.reward.models.child import Child, ChildEndedError, Children
from services.reward.reasoning_gym.cell import SCORE_TIMEOUT_S, START_TIMEOUT_S

MAX_ANSWER_CHARACTERS = 16384
NUM_CELLS = 2
_MAX_LINE_BYTES = 64 * 1024
_SLACK_S = 10.0
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_STATUSES = {
    "limit": ScoreStatus.CANDIDATE_LIMIT,
    "invalid": ScoreStatus.INVALID,
    "failed": ScoreStatus.FAILED,
    "error": ScoreStatus.SANDBOX_ERROR,
}
"""By the key of a worker's answer that is no value."""


class ReasoningGymReward(BatchReward):
    """Scores answers in `NUM_CELLS` child processes, each with a sandbox."""

    name = "reasoning_gym"

    def __init__(self, config: CodeConfig) -> None:
        """`config` says which sandbox.

        Raises RewardLoadError: no sandbox works here, or the package is missing.
        """
        try:
            require_package("reward 'reasoning_gym'")
            # Its package is here; a service elsewhere runs programs alone.
            sandbox, _ = find_sandbox("auto" if config.sandbox == "remote" else config.sandbox)
        except ConfigError as error:
            raise RewardLoadError(str(error)) from error
        except SandboxError as error:
            raise RewardLoadError(f"reward 'reasoning_gym' needs a sandbox, and none works here: {error}") from error
        module = "services.reward.reasoning_gym.cell"
        self._cells = Children([Child(module, sandbox, max_line_bytes=_MAX_LINE_BYTES) for _ in range(NUM_CELLS)])

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return await self.score_within(items, timeout_s=1e6)

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those not reached within `timeout_s` seconds time out."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return await asyncio.gather(*(self._score_one(item, deadline_s) for item in items))

    async def close(self) -> None:
        """End the child processes."""
        await self._cells.stop()

    async def _score_one(self, item: RewardItem, deadline_s: float) -> RewardResult:
        spec = item.metadata.get("reasoning_gym")
        if fault := _fault(spec):
            return RewardResult(status=ScoreStatus.INVALID, message=fault)
        request = {"row": spec, "expected": item.answer, "given": answer_of(item.completion)[:MAX_ANSWER_CHARACTERS]}
        longest_s = SCORE_TIMEOUT_S + START_TIMEOUT_S + _SLACK_S
        try:
            async with self._cells.lent(deadline_s=deadline_s) as cell:
                found = await cell.ask(request, timeout_s=longest_s, deadline_s=deadline_s)
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message="no score in time")
        except ChildEndedError as error:
            return RewardResult(status=ScoreStatus.SANDBOX_ERROR, message=f"the process that scores: {error}")
        return _result(found)


def answer_of(completion: str) -> str:
    """What a completion answers."""
    tagged = _TAGGED.findall(completion)
    return str(tagged[-1] if tagged else completion.rpartition("####")[2]).strip()


def _fault(spec: Any) -> str:
    """Why the metadata names no row; empty if it does."""
    if not isinstance(spec, dict):
        return "this row was not drawn from reasoning_gym: its metadata has no such object; name another reward"
    try:
        found = {"reasoning_gym": spec.get("name"), **{key: spec.get(key) for key in ("seed", "level", "config")}}
        ReasoningGymSource.model_validate(found)
    except ValueError as error:
        return f"reasoning_gym: {error}"[:500]
    index = spec.get("index")
    return "" if isinstance(index, int) and 0 <= index < MAX_ROWS else f"reasoning_gym.index: {index!r:.40}"


def _result(found: dict[str, Any]) -> RewardResult:
    if "value" in found:
        return RewardResult(found["value"])
    for key, status in _STATUSES.items():
        if key in found:
            return RewardResult(status=status, message=str(found[key]))
    return RewardResult(status=ScoreStatus.SANDBOX_ERROR, message="the process that scores gave no answer")
