"""Defines the inputs and answers of dispatch policies. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from services.broker.dispatch.calibration import Calibration
from services.broker.dispatch.latency import Load
from services.broker.dispatch.length_histogram import LengthCounts

EXACT = Calibration()
"""The calibration of exact forecasts."""
USUAL_RISK = 2.0
"""Standard deviations: with a hundred samples a few are that much longer than forecast."""
NEW_RANK = 2
"""First number of the rank of a training group that has not started."""
Rank = tuple[int, ...]
"""Rank of a group in a queue: smaller goes first, the last number is its sequence."""


class Order(StrEnum):
    """The order in which a policy sees the queued groups."""

    ARRIVAL = "arrival"
    """In order of submission."""
    LENGTH = "length"
    """Longest forecast first among `groups_per_step` consecutive submissions: no group is overtaken by a later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a policy deals the queue to the fleet; see `dealing.table`."""

    order: Order
    risk: float = USUAL_RISK
    """Samples are placed as if they were this many standard deviations longer than forecast, so that none turns out
    long on a slow generator."""
    threshold: float = 0.0
    """A longer forecast belongs to the long tail, see `streamrl`; meaningless if nothing is separated."""
    long_tail_ids: frozenset[str] = frozenset()
    """Generators that decode the long tail; empty if nothing is separated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """The properties that place a group in the queues."""

    sequence: int
    """Order of submission, from 1."""
    is_evaluation: bool
    is_started: bool
    """Whether any of its samples is under way, done, or returned from a lost lease."""
    predicted_tokens: float
    """Forecast of a completion's length; 0 if unknown."""

    @property
    def rank_by_arrival(self) -> Rank:
        """Evaluation first (its caller waits), then started groups (their siblings wait), then by submission."""
        return (self._class, self.sequence)

    def rank_by_length(self, groups_per_step: int) -> Rank:
        """The same classes; in each, longest first inside a window of one step's groups."""
        return (self._class, (self.sequence - 1) // groups_per_step, -round(self.predicted_tokens), self.sequence)

    @property
    def _class(self) -> int:
        if self.is_evaluation:
            return 0
        return 1 if self.is_started else NEW_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The queued samples of one group, as a policy sees them."""

    num_samples: int
    """Samples to lease, at least 1."""
    context_tokens: float
    """Tokens each holds before it decodes its next one: prompt and prefix."""
    length_tokens: float
    """Forecast of each one's whole completion; 0 if unknown."""
    remaining_tokens: float
    """Expected remaining tokens of each; from the run's mean without a forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt with samples queued or under way, as a look-ahead sees it."""

    predicted_tokens: float
    """Forecast of a completion's length; 0 if unknown."""
    num_queued: int
    step: int = 0
    """Number of its window of `groups_per_step` submissions: the longest first inside one."""
    is_begun: bool = False
    """Whether it goes before others."""
    ended: Sequence[int] = ()
    """Tokens of its samples that have ended."""
    running: Sequence[tuple[str, int]] = ()
    """For each leased sample, the generator and the tokens decoded so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The fleet and the queue when a generator asks."""

    asking: str
    """Id of the generator that asks; its load is among `loads`."""
    loads: Mapping[str, Load]
    """Every generator that takes work now, by id."""
    queue: LengthCounts
    """Lengths of everything queued, as forecast."""
    under_way: LengthCounts
    """Lengths of everything leased, as forecast when it was leased."""
    prompts: Sequence[Prompt] = ()
    """Queued samples in order of arrival, as many as a look-ahead needs, and those under way; for reviews."""
    mean_tokens: float
    """Expected tokens of a completion without a forecast."""
    has_forecasts: bool
    """Whether lengths are forecast, so that their order means something."""
    has_speeds: bool
    """Whether any generator's speed is known."""
    max_tokens: float = float("inf")
    """No completion is longer."""
    length_error: float = 0.0
    """Standard deviation of the logarithm of true length over forecast, as seen so far."""
    calibration: Calibration = EXACT
    """How true lengths follow from forecasts, as seen so far."""
    steps_overlap: bool = False
    """Whether the next step's prompts arrive before this one's samples have all ended: `max_staleness` is above 0."""
    look_s: float = 1.0
    """Interval at which policies are reviewed and idle generators look for work to steal."""

    def copy(self) -> Situation:
        """A private copy."""
        return replace(
            self,
            loads={name: load.copy() for name, load in self.loads.items()},
            queue=self.queue.merged(LengthCounts()),
            under_way=self.under_way.merged(LengthCounts()),
        )


class DispatchPolicy(Protocol):
    """One run's policy in one broker process; its memory is a hint and may be lost at any time."""

    @property
    def name(self) -> str:
        """As in RunPolicy.dispatch."""
        ...

    @property
    def needs_situation(self) -> bool:
        """Whether `review` and `rule` use the situation; there need not be one otherwise."""
        ...

    def review(self, situation: Situation) -> None:
        """Reconsider the choices that outlast one answer; called about once a second."""
        ...

    def rule(self, situation: Situation) -> Rule | None:
        """How to deal the queue to the whole fleet; None if a generator that asks gets all that it can hold."""
        ...
