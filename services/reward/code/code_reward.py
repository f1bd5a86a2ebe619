"""1 when the completion's program passes the row's tests, run in sandboxes (`services.reward.code`).

Invariant: what is wrong with a sandbox, or with a row's tests, is never a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.rewards import (
    BatchReward,
    ModelAwayError,
    RewardItem,
    RewardLoadError,
    RewardResult,
    ScoreStatus,
    UnscorableError,
)
from penstock.security import NO_SECURITY, Security
from penstock.tracing.measuring import measuring_detail
from services.reward.code.cell import Job, Verdict
from services.reward.code.cells import Cells, LocalCells
from services.reward.code.config import CodeConfig
from services.reward.code.program import program_of
from services.reward.code.remote_cells import RemoteCells
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.code.suites import suite_of


class CodeReward(BatchReward):
    """Runs programs in cells, each in a sandbox."""

    name = "code"

    def __init__(self, config: CodeConfig, *, drops_at_limit: bool = False, security: Security = NO_SECURITY) -> None:
        """`drops_at_limit` gives a program that exceeds a limit the status CANDIDATE_LIMIT, in place of a failed test.

        `security` is what the run's own services are shown. Raises RewardLoadError: no sandbox works here.
        """
        self._config = config
        self._drops_at_limit = drops_at_limit
        self._cells = _cells(config, security)

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order. Raises ModelAwayError."""
        return await self.score_within(items, timeout_s=float("inf"))

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those not reached within `timeout_s` seconds time out.

        Raises ModelAwayError: programs cannot be run at present.
        """
        deadline_s = asyncio.get_running_loop().time() + min(timeout_s, 1e6)
        results: list[RewardResult] = []
        for found in await asyncio.gather(
            *(self._score_one(item, deadline_s) for item in items), return_exceptions=True
        ):
            if isinstance(found, BaseException):
                raise found
            results.append(found)
        return results

    async def check(self) -> str:
        """Where programs run. Raises RewardLoadError and ModelAwayError."""
        return await self._cells.check()

    async def probe(self) -> None:
        """Return when programs can be run. Raises ModelAwayError."""
        await self._cells.probe()

    async def close(self) -> None:
        """End child processes and connections."""
        await self._cells.close()

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
            limits=self._config.limits,
            stops_early=self._config.credit == "all",
        )
        try:
            num_tests = {"rl.program.tests": suite.num_tests}
            with measuring_detail("rl.program.run", num_tests, sample=item.traceparent, run_id=item.run_id) as measured:
                verdict = await self._cells.run(job, deadline_s=deadline_s)
                measured.error = verdict.error
            return self._result(verdict)
        except ModelAwayError:
            raise
        except TimeoutError:
            return RewardResult(status=ScoreStatus.TIMEOUT, message="no verdict in time: more num_cells, or timeout_s")
        except SandboxError as error:
            return RewardResult(status=ScoreStatus.SANDBOX_ERROR, message=str(error))

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


def _cells(config: CodeConfig, security: Security) -> Cells:
    if config.sandbox_service is not None:
        return RemoteCells(config.sandbox_service, limits=config.limits, security=security)
    try:
        sandbox, _ = find_sandbox(config.sandbox)
    except SandboxError as error:
        raise RewardLoadError(f"reward 'code' needs a sandbox, and none works here: {error}") from error
    return LocalCells(sandbox, config.num_cells)
