"""Runs programs by SandboxService, on machines of their own (`penstock serve sandbox`).

Invariant: whatever goes wrong with the service is no verdict: the program's sample waits, or is a sandbox error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

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
from services.reward.code.program_messages import excess, job_request
from services.reward.code.sandboxes.sandbox import Limits, SandboxError

PROBE_TIMEOUT_S = 5.0
_AWAY = (ServiceUnavailableError, BadTokenError, ForbiddenError, NotOfferedError)
"""Not the program's fault, and an operator has to see to it."""
_Response = TypeVar("_Response")


class SandboxConnection:
    """Calls of a sandbox service, or of several that stand in for each other."""

    def __init__(self, target: str, security: Security) -> None:
        """`target` is host:port, several separated by commas."""
        self.target = target
        self._channel = open_channel(target, security)
        self.stub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)

    async def ask(
        self, method: Callable[..., Awaitable[_Response]], request: Message, *, deadline_s: float
    ) -> _Response:
        """Its answer.

        Raises:
            TimeoutError: None by `deadline_s` of the event loop's clock.
            ModelAwayError: It is away, or refuses this caller.
            SandboxError: Any other error of it.
        """
        timeout_s = deadline_s - asyncio.get_running_loop().time()
        if timeout_s <= 0:
            raise TimeoutError
        try:
            return await call(method, request, peer=self.target, timeout_s=timeout_s)
        except DeadlineError as error:
            raise TimeoutError(str(error)) from error
        except _AWAY as error:
            raise ModelAwayError(f"sandbox service {error}") from error
        except PenstockError as error:
            raise SandboxError(f"sandbox service {error}") from error

    async def describe(self) -> sandbox_pb2.GetSandboxResponse:
        """What it says of itself. Raises ModelAwayError."""
        request = sandbox_pb2.GetSandboxRequest()
        try:
            return await call(self.stub.GetSandbox, request, peer=self.target, timeout_s=PROBE_TIMEOUT_S)
        except PenstockError as error:
            raise ModelAwayError(f"sandbox service {error}") from error

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class RemoteCells:
    """Cells of a sandbox service."""

    def __init__(self, target: str, *, limits: Limits, security: Security) -> None:
        """`target` is host:port, several separated by commas; `limits` what programs will be given."""
        self._connection = SandboxConnection(target, security)
        self._limits = limits

    async def run(self, job: Job, *, deadline_s: float) -> Verdict:
        """How a program did."""
        connection = self._connection
        found = await connection.ask(connection.stub.RunProgram, job_request(job), deadline_s=deadline_s)
        verdict = Verdict(
            num_tests=found.num_tests,
            num_passed=found.num_passed,
            limit=found.limit,
            invalid=found.invalid,
            error=found.error,
        )
        if not verdict.error and (verdict.num_tests != job.suite.num_tests or verdict.num_passed > verdict.num_tests):
            raise SandboxError(
                f"sandbox service {connection.target}: {verdict.num_passed} of {verdict.num_tests} tests passed, and "
                f"{job.suite.num_tests} were sent"
            )
        return verdict

    async def check(self) -> str:
        """Where programs run. Raises RewardLoadError: it does not allow what they need; and ModelAwayError."""
        found, target = await self._connection.describe(), self._connection.target
        if problem := excess(self._limits, found.most):
            raise RewardLoadError(
                f"reward.code: {problem} by {target}; ask for less here, or allow more there, by programs.*"
            )
        return f"programs run at {target}, {found.num_cells} at once, in {found.sandbox}"

    async def probe(self) -> None:
        """Return when it answers. Raises ModelAwayError."""
        await self._connection.describe()

    async def close(self) -> None:
        """Close the channel."""
        await self._connection.close()
