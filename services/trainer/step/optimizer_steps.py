"""From the lessons of a batch to its optimiser steps: one, or several of a minibatch each.

    StreamedUpdate     add: forward and backward as packs fill       finish: what waited, one optimiser step
    MinibatchUpdates   add: proximal, reference log-probs likewise   finish: what waited, then for each minibatch
                                                                     forward, backward, optimiser step

Invariants:
- Proximal log-probs are those of the weights with which the batch began: all are there before the first optimiser step.
- A lesson is in exactly one minibatch, with all others of its group.
- The minibatches depend on what is in the batch, not on the order in which it came.
- A pass waits until its pack is nearly full, or until the batch is whole.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.trainer.algorithms.base import Normalization, divisor
from services.trainer.batches.packing import Pack, Trajectory, full_enough
from services.trainer.batches.rank_partition import deal, tokens_of_a_round
from services.trainer.model.backend import (
    Backend,
    LossTotals,
    NonFiniteError,
    NonFiniteGradientError,
    NonFiniteLossError,
    PartialStepError,
    StepMetrics,
)
from services.trainer.step.prior_logprobs import EarlyScores
from services.trainer.step.step_settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One sample as the optimiser sees it."""

    group_id: str
    num_tokens: int
    """Prompt and completion."""
    num_loss_tokens: int
    trajectory: Trajectory | None
    """None where it has no gradient; it counts in the divisor all the same."""


class Updates(Protocol):
    """The optimiser steps of one batch. Errors of the backend pass through; nothing may be called after one."""

    passes: Passes

    def add(self, lessons: Sequence[Lesson]) -> int:
        """Takes lessons of whole groups, and makes what passes they fill; returns how many of them for gradients."""

    def finish(self, lessons: Sequence[Lesson]) -> StepMetrics:
        """Takes the steps, with these lessons too: the last one's numbers, but the mean of the gradients' norms.

        Raises:
            ValueError: There is no loss token at all.
            NonFiniteError: Nothing was changed; it names the groups that may be at fault.
            PartialStepError: The same after the first of several steps.
        """


def updates_of(backend: Backend, settings: StepSettings) -> Updates:
    """As many optimiser steps as the settings say."""
    return StreamedUpdate(backend, settings) if settings.num_minibatches == 1 else MinibatchUpdates(backend, settings)


class Passes:
    """Forward and backward passes, and what they came to."""

    def __init__(self, backend: Backend, *, max_pack_tokens: int) -> None:
        self._backend = backend
        self._max_pack_tokens = max_pack_tokens
        self.round_tokens = tokens_of_a_round(max_pack_tokens, shares=backend.shares)
        self.num_packs = 0
        self.num_tokens = 0
        """Tokens that went through the model."""
        self.num_budgeted_tokens = 0
        """Tokens for which those passes had room."""
        self.totals = LossTotals()

    def run(self, trajectories: Sequence[Trajectory]) -> int:
        """Adds their gradients; returns the number of packs."""
        rounds = deal(trajectories, max_pack_tokens=self._max_pack_tokens, shares=self._backend.shares)
        for packs in rounds:
            self.totals = self.totals.merged(self._forward_backward(packs, trajectories))
        made = [pack for packs in rounds for pack in packs if pack is not None]
        num_tokens = sum(pack.num_tokens for pack in made)
        self.num_tokens += num_tokens
        self.num_budgeted_tokens += max(num_tokens, len(rounds) * self.round_tokens)
        self.num_packs += len(made)
        return len(made)

    def _forward_backward(self, packs: Sequence[Pack | None], trajectories: Sequence[Trajectory]) -> LossTotals:
        try:
            return self._backend.forward_backward(*packs)
        except NonFiniteLossError as error:
            members = [member for pack in packs if pack is not None for member in pack.members]
            raise NonFiniteLossError(str(error), (trajectories[member].group_id for member in members)) from error


class StreamedUpdate:
    """One optimiser step. Its trajectories are let go once they went through the model."""

    def __init__(self, backend: Backend, settings: StepSettings) -> None:
        self._backend = backend
        self._normalization = settings.normalization
        self.passes = Passes(backend, max_pack_tokens=settings.max_pack_tokens)
        self._waiting: list[Lesson] = []
        self._counted: list[Lesson] = []

    def add(self, lessons: Sequence[Lesson]) -> int:
        """See `Updates`."""
        self._counted += [replace(lesson, trajectory=None) for lesson in lessons]
        arrived = [lesson for lesson in lessons if lesson.trajectory is not None]
        due, self._waiting = _due([*self._waiting, *arrived], self.passes)
        return self.passes.run(_taught(due))

    def finish(self, lessons: Sequence[Lesson]) -> StepMetrics:
        """See `Updates`."""
        self._counted += [replace(lesson, trajectory=None) for lesson in lessons]
        self.passes.run(_taught([*self._waiting, *lessons]))
        return _optimizer_step(self._backend, self._counted, self._normalization, is_last=True)


class MinibatchUpdates:
    """Several optimiser steps; the whole batch is held until the last.

    Source: AReaL (arXiv 2505.24298) section 5.2: PPO minibatches, with proximal log-probs recomputed when the global
    batch arrives. Difference: they are computed while it arrives, under the same weights.
    """

    def __init__(self, backend: Backend, settings: StepSettings) -> None:
        self._backend = backend
        self._settings = settings
        self.passes = Passes(backend, max_pack_tokens=settings.max_pack_tokens)
        self._early = EarlyScores(backend, settings)
        self._waiting: list[Lesson] = []
        self._lessons: list[Lesson] = []

    def add(self, lessons: Sequence[Lesson]) -> int:
        """See `Updates`."""
        if self._early.is_needed:
            self._lessons += [lesson for lesson in lessons if lesson.trajectory is None]
            arrived = [lesson for lesson in lessons if lesson.trajectory is not None]
            due, self._waiting = _due([*self._waiting, *arrived], self.passes)
            self._lessons += self._with_scores(due)
        else:
            self._lessons += lessons
        return 0

    def finish(self, lessons: Sequence[Lesson]) -> StepMetrics:
        """See `Updates`."""
        rest = [*self._waiting, *lessons]
        self._lessons += self._with_scores(rest)
        minibatches = [
            minibatch
            for minibatch in split(self._lessons, num_minibatches=self._settings.num_minibatches)
            if any(lesson.num_loss_tokens for lesson in minibatch)
        ]
        steps: list[StepMetrics] = []
        for number, minibatch in enumerate(minibatches, 1):
            try:
                steps.append(self._step(minibatch, is_last=number == len(minibatches)))
            except NonFiniteError as error:
                if not steps:
                    raise
                raise PartialStepError(f"in optimiser step {number} of {len(minibatches)}: {error}") from error
        return replace(steps[-1], grad_norm=statistics.fmean(step.grad_norm for step in steps))

    def _step(self, minibatch: Sequence[Lesson], *, is_last: bool) -> StepMetrics:
        self.passes.run(_taught(minibatch))
        return _optimizer_step(self._backend, minibatch, self._settings.normalization, is_last=is_last)

    def _with_scores(self, lessons: Sequence[Lesson]) -> list[Lesson]:
        """The same with the log-probs that gradients are taken against."""
        scored = iter(self._early.of(_taught(lessons)))
        return [lesson if lesson.trajectory is None else replace(lesson, trajectory=next(scored)) for lesson in lessons]


def split(lessons: Sequence[Lesson], *, num_minibatches: int) -> list[list[Lesson]]:
    """Whole groups to minibatches of about as many tokens, each of at least one group where there are so many.

    Source: longest processing time first (Graham 1969).
    """
    groups: dict[str, list[Lesson]] = defaultdict(list)
    for lesson in lessons:
        groups[lesson.group_id].append(lesson)
    sizes = {group_id: sum(lesson.num_tokens for lesson in group) for group_id, group in groups.items()}
    names: list[list[str]] = [[] for _ in range(num_minibatches)]
    loads = [0] * num_minibatches
    for group_id in sorted(groups, key=lambda group_id: (-sizes[group_id], group_id)):
        lightest = loads.index(min(loads))
        names[lightest].append(group_id)
        loads[lightest] += sizes[group_id]
    return [[lesson for group_id in sorted(members) for lesson in groups[group_id]] for members in names]


def _due(lessons: Sequence[Lesson], passes: Passes) -> tuple[list[Lesson], list[Lesson]]:
    """Those whose pass need not wait any more, and those that wait."""
    return full_enough(lessons, lengths=[lesson.num_tokens for lesson in lessons], capacity=passes.round_tokens)


def _taught(lessons: Sequence[Lesson]) -> list[Trajectory]:
    return [lesson.trajectory for lesson in lessons if lesson.trajectory is not None]


def _optimizer_step(
    backend: Backend, lessons: Sequence[Lesson], normalization: Normalization, *, is_last: bool
) -> StepMetrics:
    """The step over the accumulated gradient of these lessons."""
    whole = divisor(
        normalization,
        num_tokens=sum(lesson.num_loss_tokens for lesson in lessons),
        num_samples=sum(lesson.num_loss_tokens > 0 for lesson in lessons),
    )
    try:
        return backend.optimizer_step(divisor=whole, is_last=is_last)
    except NonFiniteGradientError as error:
        raise NonFiniteGradientError(str(error), (lesson.group_id for lesson in lessons)) from error
