"""Runs programs by SandboxService, on machines of their own (`penstock serve sandbox`).

Invariant: whatever goes wrong with the service is no verdict: the program's sample waits, or is a sandbox error.
"""

from __future__ import annotations

import asyncio

from penstock.errors import (
    BadTokenError,
    DeadlineError,
    ForbiddenError,
    NotOfferedError,
    PenstockError,
    ServiceUnavailableError,
)
from penstock.network.rpc import call, open_channel
from penstock.rewards import ModelAwayError, RewardLoadError
from penstock.security import Security
from penstock.v1 import sandbox_pb2, sandbox_pb2_grpc
from services.reward.code.cell import Job, Verdict
from services.reward.code.sandbox import Limits, SandboxError
from services.reward.code.wire import excess, job_request

PROBE_TIMEOUT_S = 5.0
_AWAY = (ServiceUnavailableError, BadTokenError, ForbiddenError, NotOfferedError)
"""Not the program's fault, and an operator has to see to it."""


class RemoteCells:
    """A sandbox service, or several that stand in for each other."""

    def __init__(self, target: str, *, limits: Limits, security: Security) -> None:
        """`target` is host:port, several separated by commas; `limits` what programs will be given."""
        self._target = target
        self._limits = limits
        self._channel = open_channel(target, security)
        self._stub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)

    async def run(self, job: Job, *, deadline_s: float) -> Verdict:
        """How a program did."""
        timeout_s = deadline_s - asyncio.get_running_loop().time()
        if timeout_s <= 0:
            raise TimeoutError
        try:
            found = await call(self._stub.RunProgram, job_request(job), peer=self._target, timeout_s=timeout_s)
        except DeadlineError as error:
            raise TimeoutError(str(error)) from error
        except _AWAY as error:
            raise ModelAwayError(f"sandbox service {error}") from error
        except PenstockError as error:
            raise SandboxError(f"sandbox service {error}") from error
        verdict = Verdict(
            num_tests=found.num_tests,
            num_passed=found.num_passed,
            limit=found.limit,
            invalid=found.invalid,
            error=found.error,
        )
        if not verdict.error and (verdict.num_tests != job.suite.num_tests or verdict.num_passed > verdict.num_tests):
            raise SandboxError(
                f"sandbox service {self._target}: {verdict.num_passed} of {verdict.num_tests} tests passed, and "
                f"{job.suite.num_tests} were sent"
            )
        return verdict

    async def check(self) -> str:
        """Where programs run. Raises RewardLoadError: it does not allow what they need; and ModelAwayError."""
        found = await self._described()
        if problem := excess(self._limits, found.most):
            raise RewardLoadError(
                f"reward.code: {problem} by {self._target}; ask for less here, or allow more there, by programs.*"
            )
        return f"programs run at {self._target}, {found.num_cells} at once, in {found.sandbox}"

    async def probe(self) -> None:
        """Return when it answers. Raises ModelAwayError."""
        await self._described()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _described(self) -> sandbox_pb2.GetSandboxResponse:
        request = sandbox_pb2.GetSandboxRequest()
        try:
            return await call(self._stub.GetSandbox, request, peer=self._target, timeout_s=PROBE_TIMEOUT_S)
        except PenstockError as error:
            raise ModelAwayError(f"sandbox service {error}") from error
