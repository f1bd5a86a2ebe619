"""Batching: which ready groups go to the trainer now. Pure.

With the trainer at version t and B groups a step, groups whose deadline is t or earlier are *due*: they must be in this
step. A ready group is handed out when it is due, or when the step still has room after every due group has its place.
Never more than B are handed out and unacknowledged. So a slow group is waited for instead of becoming too stale; under
StalePolicy DROP nobody waits: no place is kept, though what is due still goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.broker.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A group whose samples are all scored or dropped."""

    group_id: str
    deadline: int
    """Last policy version that may train on it."""
    ready_s: float
    num_tokens: int
    """Prompts and completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The step that is being filled."""

    limits: Limits
    policy_version: int
    num_delivered: int
    """Training groups handed out and not acknowledged."""
    num_due: int
    """Training groups to keep a place for: started, not handed out, with a deadline not after policy_version; ready
    ones included. 0 under StalePolicy DROP."""


def choose(ready: Sequence[ReadyGroup], step: StepView, *, max_groups: int, target_tokens: int) -> list[str]:
    """Ids of at most `max_groups` groups to hand out, oldest deadline first, then in order of readiness.

    Stops once the chosen ones hold `target_tokens` tokens; 0 means no aim.
    """
    chosen: list[str] = []
    num_delivered, num_due, num_tokens = step.num_delivered, step.num_due, 0
    for group in sorted(ready, key=lambda group: (group.deadline, group.ready_s, group.group_id)):
        if len(chosen) >= max_groups or num_delivered >= step.limits.groups_per_step:
            break
        if target_tokens and num_tokens >= target_tokens:
            break
        is_due = group.deadline <= step.policy_version
        if not is_due and num_delivered + num_due >= step.limits.groups_per_step:
            break
        chosen.append(group.group_id)
        num_delivered += 1
        num_due = max(0, num_due - int(is_due))
        num_tokens += group.num_tokens
    return chosen
