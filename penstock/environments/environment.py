"""The interface of an environment: subclass `Environment`, or write a function that makes one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from penstock.environments.types import Action, Opening, Outcome, Task


class Environment(ABC):
    """One session of an environment; a server makes an instance for each, calls `reset` once, then `step` turn by turn.

    Methods may be plain or `async`. Plain ones run in threads, those of one instance never at the same time; of other
    instances at any time, so what instances share needs locks. An exception ends the sample without a reward.

    Promise to keep: given the task and the turns so far, answers are repeatable. A session whose server died is opened
    again elsewhere, its turns are repeated, and an answer that differs from the recorded one ends the sample.
    """

    name: ClassVar[str] = ""
    """Name for logs and reports; empty means the class's name."""
    version: ClassVar[str] = ""
    """Version of the environment, free text."""
    wants_token_ids: ClassVar[bool] = False
    """Whether Action.token_ids should be filled."""
    opens: ClassVar[bool] = False
    """Whether `reset` answers with messages, beyond the data row's prompt."""
    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """The tools that the model is shown, in the form of OpenAI's `tools`; the same for every task."""

    @abstractmethod
    def reset(self, task: Task) -> Opening | Awaitable[Opening | None] | None:
        """Begin; None is an Opening without anything. Raises UnplayableError for a task that cannot be played."""

    @abstractmethod
    def step(self, action: Action) -> Outcome | Awaitable[Outcome]:
        """Take one turn."""

    def close(self) -> Awaitable[None] | None:  # noqa: B027 -- most environments hold nothing, so this is optional
        """Release what the session holds; called once, also after an error."""


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one session: the class itself, or a function whose attributes `name`, `version`,
`wants_token_ids`, `opens` and `tools` are read as the class's would be."""
