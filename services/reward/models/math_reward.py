"""1 when the completion's final expression equals the reference mathematically, by the library math-verify.

Invariant: no expression blocks the service. Comparison runs in child processes that are killed at their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardResult, ScoreStatus
from services.reward.models.answers import final_answer

NUM_WORKERS = 2
ITEM_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
MAX_EXPRESSION_CHARACTERS = 4096
_MAX_LINE_BYTES = 64 * 1024
_WORKER = "services.reward.models.math_worker"


class MathReward(BatchReward):
    """Compares expressions in `NUM_WORKERS` child processes."""

    name = "math"

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RewardLoadError("reward 'math' needs the package math-verify: pip install math-verify")
        self._workers = [_Worker() for _ in range(NUM_WORKERS)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return await self.score_within(items, timeout_s=ITEM_TIMEOUT_S * len(items))

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those not reached within `timeout_s` seconds time out."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return await asyncio.gather(*(self._score_one(item, deadline_s) for item in items))

    async def close(self) -> None:
        """End the child processes."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def _score_one(self, item: RewardItem, deadline_s: float) -> RewardResult:
        if not item.answer.strip():
            return RewardResult(
                status=ScoreStatus.INVALID, message="this row has no reference answer, which math needs"
            )
        completion = _expression(item.completion)
        if completion is None:
            return RewardResult(0.0)
        try:
            async with asyncio.timeout_at(deadline_s):
                worker = await self._idle.get()
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message="every math worker was busy")
        try:
            left_s = deadline_s - asyncio.get_running_loop().time()
            return await worker.ask({"completion": completion, "answer": item.answer}, timeout_s=left_s)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """One child process, started when it is first needed and again after it was killed."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, request: dict[str, str], *, timeout_s: float) -> RewardResult:
        """The child's answer. Cancelling kills it, since its late answer would be taken for the next one's."""
        is_fresh = self._process is None
        timeout_s = min(timeout_s, START_TIMEOUT_S if is_fresh else ITEM_TIMEOUT_S)
        line = b""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._exchange(request)
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message=f"no verdict within {timeout_s:.3g} s")
        except (BrokenPipeError, ConnectionResetError, ValueError):
            line = b""
        finally:
            if not line:
                await self.stop()
        if not line:
            return RewardResult(status=ScoreStatus.FAILED, message="the math worker ended while it judged this sample")
        answer = json.loads(line)
        if "invalid" in answer:
            return RewardResult(status=ScoreStatus.INVALID, message=answer["invalid"])
        return RewardResult(float(answer["value"]))

    async def stop(self) -> None:
        """Kill the child, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _exchange(self, request: dict[str, str]) -> bytes:
        if self._process is None:
            arguments = (sys.executable, "-m", _WORKER)
            self._process = await asyncio.create_subprocess_exec(
                *arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=_MAX_LINE_BYTES
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline()


def _expression(completion: str) -> str | None:
    # The library looks for boxed and $...$ expressions itself; a plain final answer is found the way exact_match does.
    if "\\boxed{" in completion or "$" in completion:
        return completion[-MAX_EXPRESSION_CHARACTERS:]
    found = final_answer(completion)
    return None if not found else f"${found[:MAX_EXPRESSION_CHARACTERS]}$"
