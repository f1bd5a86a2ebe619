"""What passes between an environment and the sessions that a server runs of it.

Invariant: an error is never a value. An outcome carries a reward only if its status is OK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.rewards.types import ScoreStatus

__all__ = ["Action", "Message", "Opening", "Outcome", "ScoreStatus", "Task", "ToolCall", "UnplayableError"]


class UnplayableError(Exception):
    """Raised by `reset` for a task that can never be played, for example one whose data row lacks a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    """Of a data row: any; of an environment: user, tool or system."""
    content: str
    """Plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a session is about: one data row, and all that chance may decide."""

    prompt: str = ""
    """The row's prompt as text; for a chat prompt, its messages as `role: content` lines."""
    messages: Sequence[Message] = ()
    """The row's chat messages; empty when the prompt was text."""
    answer: str = ""
    """Reference answer of the row; empty when there is none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    seed: int = 0
    """Whatever is drawn at random must follow from this alone; the samples of a group have the same."""
    is_evaluation: bool = False
    """Whether the sample is only measured."""
    session_id: str = ""
    """Names the session, the same after every failure."""
    run_id: str = ""
    """The run it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a session begins."""

    messages: Sequence[Message] = ()
    """What the model sees after the row's prompt, before its first turn; only of a class with `opens`."""
    max_turns: int | None = None
    """Most turns of this session; None leaves it to the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that the model wrote."""

    name: str
    arguments_json: str
    """One JSON object, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the model."""

    text: str
    """What it wrote, without special tokens."""
    turn: int = 0
    """Which turn, from 0."""
    tool_calls: Sequence[ToolCall] = ()
    """The tool calls in it that can be read."""
    is_truncated: bool = False
    """Whether it was cut off by the length limit: no turn follows, whatever the outcome says."""
    token_ids: Sequence[int] = ()
    """The turn's token ids; only filled for environments that ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a turn led to."""

    messages: Sequence[Message] = ()
    """What the model sees before its next turn, at least one; unread if `is_done`."""
    reward: float | None = None
    """What this turn earned, finite. A sample's reward is the sum over its turns; if none has one, a reward model
    scores it."""
    is_done: bool = False
    """Whether the session is over."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for reports; those of a sample's turns are added."""
    status: ScoreStatus = ScoreStatus.OK
    """Anything but OK ends the session without a reward, and drops the sample by that name."""
    message: str = ""
    """What went wrong, in words."""
