"""One open session: calls are answered once each, and repeated calls get the stored answer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.environments.environment import Environment, EnvironmentFactory
from penstock.environments.environment_messages import MAX_TURNS, failed, read_action, write_opening, write_outcome
from penstock.environments.types import Task, UnplayableError
from penstock.errors import InternalError, InvalidFieldError, QueueFullError, TurnConflictError
from penstock.process.logger import get_logger
from penstock.rewards.outcomes import describe
from penstock.rewards.threads import DaemonThreads
from penstock.v1 import environment_pb2

_log = get_logger()


class Session:
    """An environment of its own, and the answers it gave.

    Promises: `reset` and each turn reach the environment once, however often a call is repeated, also while it is still
    being answered; a caller that gives up does not disturb the turn under way.

    Args:
        factory: Makes the environment.
        name: The environment's, for messages.
        threads: Where plain methods run.
    """

    def __init__(self, factory: EnvironmentFactory, *, name: str, threads: DaemonThreads) -> None:
        self._factory = factory
        self._name = name
        self._threads = threads
        self._environment: Environment | None = None
        self._opening: asyncio.Task[environment_pb2.ResetResponse] | None = None
        self._turns: list[tuple[bytes, asyncio.Task[environment_pb2.StepResponse]]] = []
        """Each turn as it was asked, and its answer."""
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether the environment works on a call."""
        tasks: list[asyncio.Task[Any]] = [task for _asked, task in self._turns[-1:]]
        return any(not task.done() for task in [*tasks, *([self._opening] if self._opening else [])])

    async def reset(self, task: Task) -> environment_pb2.ResetResponse:
        """The opening.

        Raises InvalidFieldError for a task that cannot be played, QueueFullError if the environment has no room for it
        yet, InternalError if `reset` failed.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._reset(task))
        return await asyncio.shield(self._opening)

    async def step(self, request: environment_pb2.StepRequest) -> environment_pb2.StepResponse:
        """The answer to a turn. Raises TurnConflictError."""
        asked, turn = request.SerializeToString(deterministic=True), request.turn
        if turn < len(self._turns) and self._turns[turn][0] != asked:
            raise TurnConflictError(f"turn: {turn} was taken with another text")
        if turn > len(self._turns):
            raise TurnConflictError(f"turn: {turn}; the next one is {len(self._turns)}")
        if turn == len(self._turns):
            await self._check_next(turn)
            # Two callers may have waited: the first one's turn counts.
            if turn < len(self._turns):
                return await self.step(request)
            self._turns.append((asked, asyncio.create_task(self._step(request))))
        return await asyncio.shield(self._turns[turn][1])

    async def close(self) -> None:
        """End it; a turn under way ends first, in its own time."""
        if self._is_closed:
            return
        self._is_closed = True
        under_way = [self._opening, *(task for _asked, task in self._turns[-1:])]
        await asyncio.gather(*(task for task in under_way if task is not None), return_exceptions=True)
        if self._environment is None:
            return
        try:
            await self._run(self._environment.close)
        except Exception as error:  # a user's class may raise anything
            _log.error("environment raised in close", environment=self._name, error=describe(error))

    async def _check_next(self, turn: int) -> None:
        if turn >= MAX_TURNS:
            raise TurnConflictError(f"turn: {turn}; a session has at most {MAX_TURNS} turns")
        if self._turns and (await asyncio.shield(self._turns[-1][1])).done:
            raise TurnConflictError(f"turn: {turn}; the session was done after turn {len(self._turns) - 1}")

    async def _reset(self, task: Task) -> environment_pb2.ResetResponse:
        try:
            self._environment = await self._run(self._factory)
            return write_opening(await self._run(self._made.reset, task))
        except UnplayableError as error:
            raise InvalidFieldError(f"{self._name}: {error}", field="task") from error
        except (InvalidFieldError, QueueFullError):
            raise
        except Exception as error:  # a user's class may raise anything
            _log.error("environment raised in reset", environment=self._name, exc_info=error)
            # Not the task's fault: it may pass, and others may fail as well.
            raise InternalError(f"{self._name} raised {describe(error)}") from error

    async def _step(self, request: environment_pb2.StepRequest) -> environment_pb2.StepResponse:
        try:
            action = read_action(request)
            return write_outcome(await self._run(self._made.step, action), name=self._name)
        except Exception as error:  # a user's class may raise anything
            _log.error("environment raised in step", environment=self._name, exc_info=error)
            return failed(f"{self._name} raised {describe(error)}")

    @property
    def _made(self) -> Environment:
        if self._environment is None:
            raise TurnConflictError("the session was not opened")
        return self._environment

    async def _run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """What a method returns; plain ones run in a thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        result = await self._threads.run(partial(method, *arguments))
        return await result if inspect.isawaitable(result) else result
