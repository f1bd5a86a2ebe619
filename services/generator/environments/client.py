"""Calls an environment: each call with its deadline, repeated while the server is away or full.

Promises:

- A call ends within `step_timeout_s` of an environment that answers, and within OUTAGE_TIMEOUT_S of one that is away.
- An answer that breaks the contract is an EnvironmentFaultError that says how; nothing of it reaches a sample.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.environments.environment_messages import answer_problem, messages_problem
from penstock.errors import (
    DeadlineError,
    InvalidFieldError,
    NotOfferedError,
    PenstockError,
    TurnConflictError,
    UnknownSessionError,
)
from penstock.network.connection import Connection
from penstock.network.outage import Outage
from penstock.network.rpc import call, call_with_retry
from penstock.v1 import environment_pb2, environment_pb2_grpc, types_pb2
from services.generator.environments.config import EnvironmentLimits
from services.generator.environments.error_policy import (
    OUTAGE_TIMEOUT_S,
    EnvironmentAwayError,
    EnvironmentFaultError,
    ErrorPolicy,
)

CLOSE_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer")


class EnvironmentClient:
    """One environment, as a generator's samples call it."""

    def __init__(self, connection: Connection, limits: EnvironmentLimits) -> None:
        self.limits = limits
        self._connection = connection
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(connection.channel)
        self._away = ""
        self._outage = Outage(connection.peer, on_notice=self._note)
        self.errors = ErrorPolicy(
            connection.peer, max_retries=limits.max_retries, max_error_share=limits.max_error_share
        )
        self._description: environment_pb2.GetEnvironmentResponse | None = None

    @property
    def notice(self) -> str:
        """A line to show while samples wait for the environment; empty while it answers."""
        return self._away or self.errors.notice

    def _note(self, text: str) -> None:
        self._away = text

    async def describe(self) -> environment_pb2.GetEnvironmentResponse:
        """What the environment says of itself; asked once. Raises as `step`, but for UnknownSessionError."""
        if self._description is None:
            try:
                request = environment_pb2.GetEnvironmentRequest()
                self._description = await self._call(self._stub.GetEnvironment, request)
            except NotOfferedError:
                self._description = environment_pb2.GetEnvironmentResponse()
        return self._description

    async def reset(self, request: environment_pb2.ResetRequest) -> environment_pb2.ResetResponse:
        """Open a session. Raises EnvironmentFaultError, EnvironmentAwayError."""
        response = await self._call(self._stub.Reset, request)
        if problem := messages_problem(response.messages, is_needed=False):
            raise _fault(f"reset: {problem}", types_pb2.SCORE_STATUS_FAILED)
        return response

    async def step(self, request: environment_pb2.StepRequest) -> environment_pb2.StepResponse:
        """Take a turn. Raises EnvironmentFaultError, EnvironmentAwayError, UnknownSessionError, TurnConflictError."""
        response = await self._call(self._stub.Step, request)
        if problem := answer_problem(response):
            raise _fault(f"turn {request.turn}: {problem}", types_pb2.SCORE_STATUS_FAILED)
        return response

    async def close(self, session_id: str) -> None:
        """End a session; one that cannot be ended is left to become idle."""
        try:
            request = environment_pb2.CloseRequest(session_id=session_id)
            await call(self._stub.Close, request, peer=self._connection.peer, timeout_s=CLOSE_TIMEOUT_S)
        except PenstockError:
            return

    async def _call(self, method: Callable[..., Awaitable[_Answer]], request: Any) -> _Answer:
        peer, timeout_s = self._connection.peer, self.limits.step_timeout_s

        async def once(request: Any, *, timeout: float) -> _Answer:
            try:
                return await call(method, request, peer=peer, timeout_s=timeout)
            except DeadlineError as error:
                message = f"no answer within {timeout:g} s (environment.step_timeout_s)"
                raise _fault(message, types_pb2.SCORE_STATUS_TIMEOUT) from error

        try:
            return await call_with_retry(
                once,
                request,
                peer=peer,
                timeout_s=timeout_s,
                give_up_after_s=OUTAGE_TIMEOUT_S,
                outage=self._outage,
            )
        except (UnknownSessionError, TurnConflictError, NotOfferedError):
            raise
        except PenstockError as error:
            if error.is_retryable and "message larger than max" not in str(error):
                raise EnvironmentAwayError(str(error)) from error
            # By INVALID_ARGUMENT an environment says that it cannot play this task.
            is_of_sample = isinstance(error, InvalidFieldError)
            raise _fault(str(error), types_pb2.SCORE_STATUS_ENVIRONMENT_ERROR, is_of_sample=is_of_sample) from error


def _fault(
    message: str, status: types_pb2.ScoreStatus.ValueType, *, is_of_sample: bool = False
) -> EnvironmentFaultError:
    return EnvironmentFaultError(message, status=status, is_of_sample=is_of_sample)
