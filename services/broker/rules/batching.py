"""Decides which ready groups go to the trainer now. Pure.

With the trainer at version t and B groups a step, groups whose deadline is t or earlier are *due*: they must be in this
step. A ready group is delivered when it is due, or when the step has a place left after every due group has its own.
Never more than B are delivered and unacknowledged. So a slow group is waited for instead of becoming too stale. Under
a StalenessPolicy that keeps no places no group is waited for, though due groups still go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from services.broker.rules.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A record whose samples are all scored or dropped; that of a put can be split."""

    group_id: str
    """The record's name."""
    deadline: int
    """Last policy version that may train on it."""
    sequence: int
    """Order of submission."""
    num_groups: int
    """In the record."""
    num_tokens: int
    """Prompt and completion tokens of all groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The step that is being filled."""

    limits: Limits
    policy_version: int
    num_delivered: int
    """Training groups delivered and not acknowledged."""
    num_due: int
    """Training groups to keep a place for: started, not delivered, with a deadline not after policy_version; ready
    ones included. 0 if the StalenessPolicy keeps no places."""


def choose(
    ready: Sequence[ReadyGroup], step: StepView, *, max_groups: int, target_tokens: int
) -> list[tuple[str, int]]:
    """The groups to deliver, oldest deadline first, then in order of submission: at most `max_groups` groups in all.

    Not in order of readiness: if places are few and none is kept, a group that is always ready last would lose its
    place to others for ever.

    Stops once the chosen ones have about `target_tokens` tokens; 0 means no target.

    Returns:
        Names of records, each with the number of its first groups that are chosen.
    """
    chosen: list[tuple[str, int]] = []
    num_chosen, num_due, num_tokens = 0, step.num_due, 0
    for group in sorted(ready, key=lambda group: (group.deadline, group.sequence)):
        if target_tokens and num_tokens >= target_tokens:
            break
        is_due = group.deadline <= step.policy_version
        room = step.limits.groups_per_step - step.num_delivered - num_chosen - (0 if is_due else num_due)
        count = min(group.num_groups, max_groups - num_chosen, room)
        if target_tokens and group.num_groups > 1:
            count = min(count, ceil((target_tokens - num_tokens) * group.num_groups / group.num_tokens))
        if count <= 0:
            break
        chosen.append((group.group_id, count))
        num_chosen += count
        num_due = max(0, num_due - count * is_due)
        num_tokens += group.num_tokens * count // group.num_groups
    return chosen
