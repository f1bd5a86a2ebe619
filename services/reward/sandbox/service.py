"""SandboxService: programs of others, in cells here."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from penstock.errors import DeadlineError
from penstock.v1 import sandbox_pb2, sandbox_pb2_grpc
from services.reward.code.cell import Verdict
from services.reward.code.cells import Cells
from services.reward.code.config import ProgramsConfig
from services.reward.code.sandbox import SandboxError
from services.reward.code.wire import limits_message, read_job

_Context = grpc.aio.ServicerContext[Any, Any]
DEFAULT_TIMEOUT_S = 600.0
_ANSWER_SHARE = 0.02
"""Part of the caller's deadline that is kept for sending the answer."""


class SandboxServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """Runs programs by this machine's own command and within its own limits."""

    def __init__(self, cells: Cells, *, sandbox: str, programs: ProgramsConfig) -> None:
        """`sandbox` is what confines the cells' programs."""
        self._cells, self._sandbox, self._programs = cells, sandbox, programs

    async def RunProgram(
        self, request: sandbox_pb2.RunProgramRequest, context: _Context
    ) -> sandbox_pb2.RunProgramResponse:
        """Run a program. A caller that goes away ends it."""
        config = self._programs
        readable = [str(path) for path in config.readable]
        job = await asyncio.to_thread(read_job, request, most=config.limits, command=config.command, readable=readable)
        remaining_s = context.time_remaining() or DEFAULT_TIMEOUT_S
        deadline_s = asyncio.get_running_loop().time() + remaining_s * (1 - _ANSWER_SHARE)
        try:
            verdict = await self._cells.run(job, deadline_s=deadline_s)
        except TimeoutError as error:
            raise DeadlineError("no verdict in time; more programs.num_cells, or a longer timeout_s") from error
        except SandboxError as error:
            verdict = Verdict(error=str(error))
        return sandbox_pb2.RunProgramResponse(
            num_tests=verdict.num_tests,
            num_passed=verdict.num_passed,
            limit=verdict.limit,
            invalid=verdict.invalid,
            error=verdict.error,
        )

    async def GetSandbox(
        self, request: sandbox_pb2.GetSandboxRequest, context: _Context
    ) -> sandbox_pb2.GetSandboxResponse:
        """Describe it."""
        del request, context
        return sandbox_pb2.GetSandboxResponse(
            sandbox=self._sandbox, most=limits_message(self._programs.limits), num_cells=self._programs.num_cells
        )
