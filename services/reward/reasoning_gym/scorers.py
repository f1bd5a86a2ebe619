"""Where answers are scored: in child processes here (`LocalScorers`), or by a sandbox service (`remote_scorers`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Protocol

from penstock.config import ConfigError
from penstock.reasoning_gym.source import MAX_ROWS, PACKAGE, ReasoningGymSource, require_package
from penstock.rewards import RewardLoadError
from services.reward.models.child import Child, ChildEndedError, Children
from services.reward.reasoning_gym.cell import SCORE_TIMEOUT_S, START_TIMEOUT_S

NUM_CELLS = 2
MAX_LINE_BYTES = 64 * 1024
_SLACK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a row."""

    row: dict[str, Any]
    """The row's name, without a `row_fault`."""
    expected: str
    """The answer that came with the row, by which it is known to be the same."""
    given: str


class Scorers(Protocol):
    """Score answers by the package's own scorers, which may evaluate them, in sandboxes."""

    async def score(self, answer: Answer, *, deadline_s: float) -> dict[str, Any]:
        """Its `value`, or why there is none: `limit`, `invalid`, `failed` or `error` with words.

        Raises:
            TimeoutError: No score by `deadline_s` of the event loop's clock.
            ModelAwayError: Answers cannot be scored at present.
        """

    async def check(self) -> str:
        """Where answers are scored, in words. Raises RewardLoadError and ModelAwayError."""

    async def probe(self) -> None:
        """Return when answers can be scored. Raises ModelAwayError."""

    async def close(self) -> None:
        """End what was started."""


class LocalScorers:
    """Child processes, each with a sandbox."""

    def __init__(self, sandbox: str) -> None:
        """`sandbox` is one that was found to work here. Raises RewardLoadError: the package is missing."""
        try:
            require_package("reward 'reasoning_gym'")
        except ConfigError as error:
            raise RewardLoadError(str(error)) from error
        self.version = version(PACKAGE)
        """Of the package."""
        module = "services.reward.reasoning_gym.cell"
        self._cells = Children([Child(module, sandbox, max_line_bytes=MAX_LINE_BYTES) for _ in range(NUM_CELLS)])

    async def score(self, answer: Answer, *, deadline_s: float) -> dict[str, Any]:
        """See `Scorers.score`."""
        longest_s = SCORE_TIMEOUT_S + START_TIMEOUT_S + _SLACK_S
        try:
            async with self._cells.lent(deadline_s=deadline_s) as cell:
                found: dict[str, Any] = await cell.ask(asdict(answer), timeout_s=longest_s, deadline_s=deadline_s)
        except ChildEndedError as error:
            return {"error": f"the process that scores: {error}"}
        return found

    async def check(self) -> str:
        """Nothing that was not said before."""
        return ""

    async def probe(self) -> None:
        """Nothing has to answer."""

    async def close(self) -> None:
        """End the child processes."""
        await self._cells.stop()


def row_fault(spec: Any) -> str:
    """Why `spec` names no row; empty if it does."""
    if not isinstance(spec, dict):
        return "this row was not drawn from reasoning_gym: its metadata has no such object; name another reward"
    try:
        found = {"reasoning_gym": spec.get("name"), **{key: spec.get(key) for key in ("seed", "level", "config")}}
        ReasoningGymSource.model_validate(found)
    except ValueError as error:
        return f"reasoning_gym: {error}"[:500]
    index = spec.get("index")
    return "" if isinstance(index, int) and 0 <= index < MAX_ROWS else f"reasoning_gym.index: {index!r:.40}"
