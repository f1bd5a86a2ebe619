"""What a staleness policy decides; the broker, the OpenAI endpoint and the simulator ask it. Pure.

With B groups a step and bound S, a group that version m begins may be trained on by the step that starts from version
m + S at the latest. So m may begin the run's n-th training group (dropped ones not counted) only if

    n <= (m + S + 1) * B

Source: AReaL (Fu et al. 2025, arXiv 2505.24298), staleness bound: floor((N_r - 1) / B) <= i + eta, where i is the
trainer's version. A policy says which version stands for m.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from penstock.v1 import broker_pb2


class StalenessBound(Protocol):
    """The run limits that staleness depends on."""

    @property
    def max_staleness(self) -> int:
        """Most policy versions a sample may lag."""
        ...

    @property
    def groups_per_step(self) -> int:
        """Groups in one step."""
        ...


def max_begun(bound: StalenessBound, version: int) -> int:
    """Training groups of a run, from its first, of which each is trained in time if `version` begins the last one."""
    return (version + bound.max_staleness + 1) * bound.groups_per_step


class StalenessPolicy(ABC):
    """See the module. Without state: one object serves every run."""

    name: ClassVar[str]
    """In configurations: policy.stale."""
    number: ClassVar[broker_pb2.StalePolicy.ValueType]
    """On the wire and in a run's record."""
    keeps_places: ClassVar[bool]
    """Whether a step keeps places for the started groups that no later step may train on."""
    accepts_late_puts: ClassVar[bool]
    """Whether a finished group is accepted although the groups ahead of it may leave it too old in its turn."""
    restarts_stale: ClassVar[bool] = True
    """Whether a group that became too old is queued again from its prompt, and not dropped for good."""

    @abstractmethod
    def start_version(self, *, trainer: int, generator: int, can_restart: bool = True) -> int:
        """The version that stands for m where a generator begins a group.

        Args:
            trainer: the trainer's version.
            generator: the generator's.
            can_restart: whether the broker has the group's prompt, and could queue it again.
        """

    @abstractmethod
    def may_join(self, *, group: int, generator: int) -> bool:
        """Whether a generator may work on a group that version `group` began, whatever else is under way."""
