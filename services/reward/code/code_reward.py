"""1 when the completion's program passes the row's tests, run in sandboxes (`services.reward.code`).

Invariant: what is wrong with a sandbox, or with a row's tests, is never a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardResult, ScoreStatus, UnscorableError
from services.reward.code.cell import Job, Verdict
from services.reward.code.config import CodeConfig
from services.reward.code.program import program_of
from services.reward.code.sandbox import Limits, SandboxError
from services.reward.code.sandboxes import find_sandbox
from services.reward.code.suites import Assertions, Streams, Suite, suite_of
from services.reward.models.child import START_TIMEOUT_S, Child, ChildEndedError, Children

MAX_LINE_BYTES = 64 * 1024
_SLACK_S = 10.0
"""For making sandboxes and comparing, beside what programs may take."""


class CodeReward(BatchReward):
    """Runs programs in `num_cells` child processes, each in a sandbox."""

    name = "code"

    def __init__(self, config: CodeConfig, *, drops_at_limit: bool = False) -> None:
        """`drops_at_limit` gives a program that exceeds a limit the status CANDIDATE_LIMIT, in place of a failed test.

        Raises RewardLoadError: no sandbox works here.
        """
        try:
            self.sandbox, _ = find_sandbox(config.sandbox)
        except SandboxError as error:
            raise RewardLoadError(f"reward 'code' needs a sandbox, and none works here: {error}") from error
        self._config = config
        self._drops_at_limit = drops_at_limit
        self._limits = Limits(
            cpu_s=config.cpu_s,
            wall_s=config.wall_s,
            memory_bytes=config.memory_mb * 1024**2,
            max_processes=config.max_processes,
            output_bytes=config.output_kb * 1024,
            life_s=config.wall_s + _SLACK_S + START_TIMEOUT_S,
        )
        self._cells = Children(
            [
                Child("services.reward.code.cell", self.sandbox, max_line_bytes=MAX_LINE_BYTES)
                for _ in range(config.num_cells)
            ]
        )

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return await self.score_within(items, timeout_s=float("inf"))

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those not reached within `timeout_s` seconds time out."""
        deadline_s = asyncio.get_running_loop().time() + min(timeout_s, 1e6)
        return await asyncio.gather(*(self._score_one(item, deadline_s) for item in items))

    async def close(self) -> None:
        """End the child processes."""
        await self._cells.stop()

    async def _score_one(self, item: RewardItem, deadline_s: float) -> RewardResult:
        try:
            suite = suite_of(item.metadata)
        except UnscorableError as error:
            return RewardResult(status=ScoreStatus.INVALID, message=str(error))
        program = program_of(item.completion)
        if program is None:
            return RewardResult(0.0, {"passed": 0.0})
        job = Job(
            program=program,
            suite=suite,
            command=self._config.command,
            readable=[str(path) for path in self._config.readable],
            limits=self._limits,
            stops_early=self._config.credit == "all",
        )
        try:
            async with self._cells.lent(deadline_s=deadline_s) as cell:
                found = await cell.ask(job.to_json(), timeout_s=self._longest_s(suite), deadline_s=deadline_s)
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message="no verdict in time: more num_cells, or timeout_s")
        except ChildEndedError as error:
            return RewardResult(status=ScoreStatus.SANDBOX_ERROR, message=f"the process that runs programs: {error}")
        return self._result(Verdict(**found))

    def _longest_s(self, suite: Suite) -> float:
        num_starts = suite.num_tests if isinstance(suite, Streams) else 2 if isinstance(suite, Assertions) else 1
        return num_starts * self._config.wall_s + _SLACK_S

    def _result(self, verdict: Verdict) -> RewardResult:
        if verdict.error:
            return RewardResult(status=ScoreStatus.SANDBOX_ERROR, message=verdict.error)
        if verdict.invalid:
            return RewardResult(status=ScoreStatus.INVALID, message=verdict.invalid)
        if verdict.limit and self._drops_at_limit:
            return RewardResult(status=ScoreStatus.CANDIDATE_LIMIT, message=f"the program exceeded {verdict.limit}")
        share = verdict.num_passed / verdict.num_tests
        value = share if self._config.credit == "share" else float(verdict.num_passed == verdict.num_tests)
        return RewardResult(value, {"passed": share, "exceeded_limit": float(bool(verdict.limit))})
