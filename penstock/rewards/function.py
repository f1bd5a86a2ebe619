"""Turns a plain function into a reward model.

    def my_reward(completion: str, answer: str) -> float | None: ...

A function takes the parameters it names: `prompt`, `completion`, `completion_turns`, `answer`, `messages`, `token_ids`,
`is_truncated`, `run_id`, `metadata` (the whole mapping), or a column of the data row's metadata; `**columns` takes
every column left. It may be `async`. It returns a number, a RewardResult, or None to abstain. An exception fails that
sample only.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, overload

from penstock.rewards.model import DEFAULT_MAX_BATCH_SIZE, BatchReward
from penstock.rewards.outcomes import is_own_cancellation, read_error, read_outcome
from penstock.rewards.threads import DaemonThreads
from penstock.rewards.types import RewardItem, RewardResult, ScoreStatus, UnscorableError

RewardFunction = Callable[..., "RewardResult | float | Awaitable[RewardResult | float | None] | None"]

DEFAULT_MAX_THREADS = 16
DEFAULT_TIMEOUT_S = 60.0

_FIELDS = (
    "prompt",
    "completion",
    "completion_turns",
    "answer",
    "messages",
    "token_ids",
    "is_truncated",
    "run_id",
    "metadata",
)


class FunctionReward(BatchReward):
    """A reward model made of one function, called once a sample: plain in threads, async in the event loop."""

    def __init__(
        self,
        function: RewardFunction,
        *,
        name: str = "",
        version: str = "",
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        wants_token_ids: bool = False,
        max_threads: int = DEFAULT_MAX_THREADS,
    ) -> None:
        """`max_threads` is how many calls of a plain function, or of an async one, may be under way at once."""
        self._parameters = _check_signature(function)
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.version = version
        self.max_batch_size = max_batch_size
        self.wants_token_ids = wants_token_ids or "token_ids" in self._parameters
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 -- asks whether a callable object's call is async
        )
        self._threads = DaemonThreads(max_threads=max_threads, name=f"reward-{self.name}")
        self._slots = asyncio.Semaphore(max_threads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, so that a decorated function stays callable."""
        return self.function(*args, **kwargs)

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return await self.score_within(items, timeout_s=DEFAULT_TIMEOUT_S)

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item; a call that does not return within `timeout_s` seconds times out alone."""
        return await asyncio.gather(*(self._score_one(item, timeout_s) for item in items))

    async def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    async def _score_one(self, item: RewardItem, timeout_s: float) -> RewardResult:
        try:
            async with asyncio.timeout(timeout_s):
                arguments = self._arguments(item)
                if not self._is_async:
                    # Read in the thread too: converting an answer may run the user's code, which may hang.
                    return await self._threads.run(lambda: read_outcome(self.function(**arguments)))
                async with self._slots:
                    return read_outcome(await self.function(**arguments))  # type: ignore[misc]
        except TimeoutError:
            return RewardResult(
                status=ScoreStatus.TIMEOUT, message=f"{self.name} did not answer within {timeout_s:.3g} s"
            )
        except BaseException as error:  # a user's function may raise anything; it concerns this sample only
            if isinstance(error, GeneratorExit) or is_own_cancellation(error):
                raise
            return read_error(error, name=self.name)

    def _arguments(self, item: RewardItem) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                taken = {*self._parameters, *_FIELDS}
                arguments.update({key: value for key, value in item.metadata.items() if key not in taken})
            elif name in _FIELDS:
                arguments[name] = getattr(item, name)
            elif name in item.metadata:
                arguments[name] = item.metadata[name]
            elif parameter.default is inspect.Parameter.empty:
                raise UnscorableError(
                    f"{self.name} asks for {name!r}, which this row's metadata does not have "
                    f"(it has: {', '.join(sorted(item.metadata)) or 'nothing'})"
                )
        return arguments


@overload
def reward(function: RewardFunction) -> FunctionReward: ...


@overload
def reward(
    *,
    name: str = "",
    version: str = "",
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    wants_token_ids: bool = False,
    max_threads: int = DEFAULT_MAX_THREADS,
) -> Callable[[RewardFunction], FunctionReward]: ...


def reward(
    function: RewardFunction | None = None, **options: Any
) -> FunctionReward | Callable[[RewardFunction], FunctionReward]:
    """Mark a function as a reward model, and name or tune it; needed only to set options.

    Example:
        @reward(version="2", max_threads=64)
        def judge(completion: str) -> float: ...
    """
    if function is not None:
        return FunctionReward(function)
    return lambda decorated: FunctionReward(decorated, **options)


def _check_signature(function: RewardFunction) -> dict[str, inspect.Parameter]:
    if not callable(function):
        raise TypeError(f"a reward must be a function or a BatchReward, got {type(function).__name__}")
    parameters = dict(inspect.signature(function).parameters)
    refused = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in parameters.items():
        if parameter.kind in refused:
            raise TypeError(
                f"reward function {getattr(function, '__name__', function)!r}: {name!r} cannot be given by name; "
                f"name what it takes: {', '.join(_FIELDS)}, or a metadata column"
            )
    return parameters
