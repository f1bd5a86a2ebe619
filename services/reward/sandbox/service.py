"""SandboxService: programs and answers of others, in cells here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc

from penstock.errors import DeadlineError, InvalidFieldError, NotOfferedError
from penstock.tracing.measuring import measuring_detail
from penstock.v1 import sandbox_pb2, sandbox_pb2_grpc
from services.reward.code.cell import Verdict
from services.reward.code.cells import Cells
from services.reward.code.config import ProgramsConfig
from services.reward.code.program_messages import limits_message, read_job
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.reasoning_gym.scorers import MAX_LINE_BYTES, Answer, LocalScorers, row_fault

_Context = grpc.aio.ServicerContext[Any, Any]
DEFAULT_TIMEOUT_S = 600.0
_ANSWER_SHARE = 0.02
"""Part of the caller's deadline that is kept for sending the answer."""


class SandboxServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """Runs programs by this machine's own command and within its own limits."""

    def __init__(
        self, cells: Cells, *, sandbox: str, programs: ProgramsConfig, scorers: LocalScorers | None = None
    ) -> None:
        """`sandbox` is what confines the cells' programs; without `scorers` no answer is scored."""
        self._cells, self._sandbox, self._programs, self._scorers = cells, sandbox, programs, scorers

    async def RunProgram(
        self, request: sandbox_pb2.RunProgramRequest, context: _Context
    ) -> sandbox_pb2.RunProgramResponse:
        """Run a program. A caller that goes away ends it."""
        config = self._programs
        readable = [str(path) for path in config.readable]
        job = await asyncio.to_thread(read_job, request, most=config.limits, command=config.command, readable=readable)
        try:
            with measuring_detail("rl.sandbox.run", {"rl.program.tests": job.suite.num_tests}) as measured:
                verdict = await self._cells.run(job, deadline_s=_deadline_s(context))
                measured.error = verdict.error
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

    async def ScoreAnswer(
        self, request: sandbox_pb2.ScoreAnswerRequest, context: _Context
    ) -> sandbox_pb2.ScoreAnswerResponse:
        """Score an answer."""
        if self._scorers is None:
            raise NotOfferedError("ScoreAnswer: there is no package reasoning-gym here; pip install reasoning-gym")
        answer = _read_answer(request)
        try:
            found = await self._scorers.score(answer, deadline_s=_deadline_s(context))
        except TimeoutError as error:
            raise DeadlineError("no score in time; a longer timeout_s") from error
        return sandbox_pb2.ScoreAnswerResponse(**found)

    async def GetSandbox(
        self, request: sandbox_pb2.GetSandboxRequest, context: _Context
    ) -> sandbox_pb2.GetSandboxResponse:
        """Describe it."""
        del request, context
        return sandbox_pb2.GetSandboxResponse(
            sandbox=self._sandbox,
            most=limits_message(self._programs.limits),
            num_cells=self._programs.num_cells,
            reasoning_gym_version="" if self._scorers is None else self._scorers.version,
        )


def _deadline_s(context: _Context) -> float:
    """When an answer has to be there, by the event loop's clock."""
    remaining_s = context.time_remaining() or DEFAULT_TIMEOUT_S
    return asyncio.get_running_loop().time() + remaining_s * (1 - _ANSWER_SHARE)


def _read_answer(request: sandbox_pb2.ScoreAnswerRequest) -> Answer:
    """The answer that was sent. Raises InvalidFieldError."""
    for field in ("row_json", "expected", "given"):
        if len(getattr(request, field).encode()) > MAX_LINE_BYTES:
            raise InvalidFieldError(f"{field}: more than {MAX_LINE_BYTES} bytes", field=field)
    try:
        row = json.loads(request.row_json)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(f"row_json: not valid JSON: {error}", field="row_json") from error
    if fault := row_fault(row):
        raise InvalidFieldError(f"row_json: {fault}", field="row_json")
    return Answer(row=row, expected=request.expected, given=request.given)
