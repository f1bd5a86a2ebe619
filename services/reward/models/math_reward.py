"""1 when the completion's final expression equals the reference mathematically, by the library math-verify.

Invariants:
- No expression blocks the service. Comparison runs in child processes that are killed at their deadline.
- What used up the CPU time or memory of such a process exceeded its own limits; waiting for a CPU says nothing of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardResult, ScoreStatus
from services.reward.models.answers import final_answer
from services.reward.models.child import Child, ChildEndedError, Children, ChildTimeoutError

NUM_WORKERS = 2
ITEM_TIMEOUT_S = 10.0
CPU_SHARE = 0.5
"""Of that time on a CPU: with less the machine was busy, which is no candidate's fault."""
MAX_EXPRESSION_CHARACTERS = 4096
_MAX_LINE_BYTES = 64 * 1024
_WORKER = "services.reward.models.math_worker"


class MathReward(BatchReward):
    """Compares expressions in `NUM_WORKERS` child processes."""

    name = "math"

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RewardLoadError("reward 'math' needs the package math-verify: pip install math-verify")
        self._workers = Children([Child(_WORKER, max_line_bytes=_MAX_LINE_BYTES) for _ in range(NUM_WORKERS)])

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return await self.score_within(items, timeout_s=ITEM_TIMEOUT_S * len(items))

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those not reached within `timeout_s` seconds time out."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return await asyncio.gather(*(self._score_one(item, deadline_s) for item in items))

    async def close(self) -> None:
        """End the child processes."""
        await self._workers.stop()

    async def _score_one(self, item: RewardItem, deadline_s: float) -> RewardResult:
        if not item.answer.strip():
            return RewardResult(
                status=ScoreStatus.INVALID, message="this row has no reference answer, which math needs"
            )
        completion = _expression(item.completion)
        if completion is None:
            return RewardResult(0.0)
        try:
            async with self._workers.lent(deadline_s=deadline_s) as worker:
                return await _judged(worker, {"completion": completion, "answer": item.answer}, deadline_s)
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message="every math worker was busy")


async def _judged(worker: Child, request: dict[str, str], deadline_s: float) -> RewardResult:
    begun_s = asyncio.get_running_loop().time()
    try:
        answer = await worker.ask(request, timeout_s=ITEM_TIMEOUT_S, deadline_s=deadline_s)
    except ChildTimeoutError as error:
        if error.cpu_s >= CPU_SHARE * ITEM_TIMEOUT_S and await _is_quick(worker, request["answer"], deadline_s):
            message = f"to compare its expression took more than {error.cpu_s:.3g} s of CPU time"
            return RewardResult(status=ScoreStatus.CANDIDATE_LIMIT, message=message)
        waited_s = asyncio.get_running_loop().time() - begun_s
        return RewardResult(status=ScoreStatus.TIMEOUT, message=f"no verdict within {waited_s:.3g} s")
    except ChildEndedError:
        return RewardResult(status=ScoreStatus.FAILED, message="the math worker ended while it judged this sample")
    if "invalid" in answer:
        return RewardResult(status=ScoreStatus.INVALID, message=answer["invalid"])
    if "limit" in answer:
        return RewardResult(status=ScoreStatus.CANDIDATE_LIMIT, message=answer["limit"])
    return RewardResult(float(answer["value"]))


async def _is_quick(worker: Child, answer: str, deadline_s: float) -> bool:
    """Whether a reference answer is compared with itself in time: if not, it is no completion's fault."""
    try:
        given = answer if "$" in answer or "\\boxed{" in answer else f"${answer}$"
        await worker.ask({"completion": given, "answer": answer}, timeout_s=ITEM_TIMEOUT_S, deadline_s=deadline_s)
    except (TimeoutError, ChildEndedError):
        return False
    return True


def _expression(completion: str) -> str | None:
    # The library looks for boxed and $...$ expressions itself; a plain final answer is found the way exact_match does.
    if "\\boxed{" in completion or "$" in completion:
        return completion[-MAX_EXPRESSION_CHARACTERS:]
    found = final_answer(completion)
    return None if not found else f"${found[:MAX_EXPRESSION_CHARACTERS]}$"
