"""What a reward model sees of a sample, and its result.

Invariant: an error is never a value. A result carries a finite number if and only if its status is OK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class UnscorableError(Exception):
    """Raised by a reward function for a sample that can never be scored, for example one without a reference answer."""


class ScoreStatus(StrEnum):
    """Outcome of scoring one sample; the names are those of `types.proto`."""

    OK = "ok"
    ABSTAINED = "abstained"
    TIMEOUT = "timeout"
    FAILED = "failed"
    INVALID = "invalid"
    CANDIDATE_LIMIT = "candidate_limit"
    SANDBOX_ERROR = "sandbox_error"
    JUDGE_ERROR = "judge_error"
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_DIVERGED = "environment_diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One finished sample to score."""

    prompt: str = ""
    """The prompt as text; for a chat prompt, its turns as `role: content` lines."""
    completion: str
    """What the model wrote, without special tokens; of several turns with an environment, a line break between them."""
    answer: str = ""
    """Reference answer of the data row; empty when there is none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The data row's other columns."""
    messages: Sequence[Turn] = ()
    """The prompt's turns; empty when the prompt was text."""
    completion_turns: Sequence[Turn] = ()
    """The model's turns (role assistant) and what an environment said between them (role environment), in order; as a
    worker sends it at least one turn."""
    token_ids: Sequence[int] = ()
    """Completion token ids, of the model's turns alone; only filled for models that ask for them."""
    is_truncated: bool = False
    """Whether the completion ended because the length limit was reached."""
    run_id: str = ""
    """The run it belongs to."""
    must_be_fresh: bool = False
    """Whether the score must not come from a cache: it is to show what the reward says now."""
    traceparent: str = ""
    """W3C trace context of the sample, where the run is traced; its flag says whether the sample is."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward model's result for one sample."""

    value: float | None = None
    """The reward, finite; None with status OK means that the model abstains."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward for reports, at most 32."""
    status: ScoreStatus = ScoreStatus.OK
    """Anything but OK carries no value."""
    message: str = ""
    """What went wrong, in words."""
    details: Mapping[str, str] = field(default_factory=dict)
    """How the value came about, for recordings, such as which model judged; at most 16 texts of 256 characters."""
