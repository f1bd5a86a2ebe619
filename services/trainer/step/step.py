"""One step of a run: groups of scored samples in, passes through the model as they arrive, optimiser steps at the end.

    open --add_groups--> open --finish---> closed   (the optimiser steps of the batch were taken, one or several)
                         open --abandon--> closed   (gradients discarded, nothing changed)

    one optimiser step    add: forward and backward as packs fill     finish: the rest, one optimiser step
    several, on           add: log-probs to compare with,             finish: the rest, then for each minibatch
    minibatches                as packs fill                                  forward, backward, optimiser step

Invariants:
- `SampleFilter` decides which samples are trained on.
- Advantages use exactly the samples of the group (for some algorithms: of the step) that are trained on. If they need
  the step, the forward passes are made in `finish`.
- A pass waits until its pack is nearly full, or until the batch is whole.
- The gradient of an optimiser step is that of all its tokens at once, however the groups were split over `add_groups`
  calls. Proximal log-probs are those of the weights with which the batch began.
- A sample is in exactly one minibatch, with all others of its group. Minibatches depend on the content of the batch,
  not on the order of arrival.
- A zero advantage contributes nothing to the gradient when no KL term does, so such samples skip the forward pass but
  count as trained: the same update for less work. Loss metrics then cover the other samples' tokens only.
- A backend error closes the step. If a number is not finite, nothing has changed, and the error names the groups that
  may be at fault: those of that forward pass, or all of the optimiser step if only the summed gradient reveals it.
  After the first of several optimiser steps it is a PartialStepError instead: training must not continue from there.
  `check` is not called between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from services.trainer.algorithms.base import divisor
from services.trainer.batches.packing import full_enough
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.model.backend import (
    BackendError,
    NonFiniteError,
    NonFiniteGradientError,
    PartialStepError,
    StepBackend,
    StepMetrics,
)
from services.trainer.step.advantages import AdvantageEstimator, TrainableSample
from services.trainer.step.passes import LossItem, Passes, split, trajectories_of
from services.trainer.step.prior_passes import PriorLogprobs, Scoring
from services.trainer.step.sample_filter import SampleFilter, SkippedSample
from services.trainer.step.step_report import StepCounts, StepReport
from services.trainer.step.step_settings import StepSettings

Skipped = tuple[SkippedSample, ...]


class EmptyStepError(Exception):
    """A step cannot finish without a single trained token."""


class StepClosedError(Exception):
    """The step has already been finished or abandoned."""


class TrainingStep:
    """Accumulates one batch on a backend, which must hold no gradients of another one.

    Args:
        backend: Computes.
        settings: Settings of the step.
        check: Called before each forward pass, but not after the first of several optimiser steps; raises a
            BackendError to cancel the step.
    """

    def __init__(
        self, backend: StepBackend, settings: StepSettings, *, check: Callable[[], None] = lambda: None
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._filter = SampleFilter(backend, settings)
        scoring = Scoring(backend, max_pack_tokens=settings.max_pack_tokens, check=check)
        self._prior = PriorLogprobs(scoring, settings)
        self._advantages = AdvantageEstimator(scoring, settings, prior=self._prior)
        self._passes = Passes(
            backend, max_pack_tokens=settings.max_pack_tokens, check=check, keeps_gaps=settings.keeps_gaps
        )
        self._counts = StepCounts(
            settings.policy_version, pass_reward=settings.pass_reward, source_names=settings.source_names
        )
        self._is_open = True
        self._is_streamed = settings.num_minibatches == 1
        self._waiting: list[LossItem] = []
        """Items that wait for a fuller pack."""
        self._ready: list[LossItem] = []
        """Items for which all passes that do not need the whole batch have been made."""

    @property
    def num_groups(self) -> int:
        """Groups seen so far, those without a trained sample included."""
        return len(self._filter.group_ids)

    def add_groups(self, groups: Sequence[Sequence[TrainingSample]]) -> Skipped:
        """Takes whole groups, and makes the passes whose packs they fill; returns the samples that were left out.

        Args:
            groups: Each the samples of one prompt; more groups per call fill packs better.

        Raises:
            StepClosedError: the step is over.
            BackendError: a loss was not finite; the step is abandoned.
        """
        return self._add(groups, is_replayed=False)

    def add_replayed(self, groups: Sequence[Sequence[TrainingSample]]) -> Skipped:
        """Takes groups that an earlier step trained on, for an algorithm that allows it.

        The replay buffer bounds their staleness. They count in the gradient, its divisor and the numbers of replayed
        samples, and nowhere else in the report.

        Raises:
            ValueError: The algorithm is not valid for samples of any policy.
            StepClosedError, BackendError: as `add_groups`.
        """
        if not self._settings.algorithm.is_off_policy:
            raise ValueError(f"{self._settings.algorithm.name} cannot train on a sample again")
        return self._add(groups, is_replayed=True)

    def finish(self) -> StepReport:
        """Takes the optimiser steps over everything added.

        Raises:
            EmptyStepError: no token was accepted; the step is abandoned, the weights are unchanged.
            NonFiniteError: the step is abandoned, the weights are unchanged.
            PartialStepError: The same after the first of several optimiser steps; the weights belong to no version.
            StepClosedError: the step is over.
        """
        with self._abandoned_on_error():
            rest = self._loss_items(self._advantages.rest(), is_replayed=False)
            if self._counts.num_loss_tokens == 0:
                self.abandon()
                raise EmptyStepError(f"none of {self.num_groups} groups had a token to train on")
            self._prepare([*self._waiting, *rest])
            metrics = self._optimizer_steps()
        self._is_open = False
        return self._counts.report(
            metrics,
            self._passes,
            num_zero_advantage_groups=self._advantages.num_zero_advantage_groups,
            skipped=tuple(self._filter.skipped),
        )

    def abandon(self) -> None:
        """Discards the accumulated gradients; harmless on a closed step."""
        if self._is_open:
            self._is_open = False
            self._backend.discard_gradients()

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Refuses a closed step; abandons an open one if the backend fails."""
        if not self._is_open:
            raise StepClosedError("this step was finished or abandoned")
        try:
            yield
        except BackendError:
            self.abandon()
            raise

    def _add(self, groups: Sequence[Sequence[TrainingSample]], *, is_replayed: bool) -> Skipped:
        with self._abandoned_on_error():
            num_skipped = len(self._filter.skipped)
            usable = [samples for group in groups if (samples := self._filter.usable(group, is_replayed=is_replayed))]
            self._prepare(self._due(self._loss_items(self._advantages.add(usable), is_replayed=is_replayed)))
            return tuple(self._filter.skipped[num_skipped:])

    def _loss_items(self, samples: Sequence[TrainableSample], *, is_replayed: bool) -> list[LossItem]:
        """Counts samples for the report; returns their contributions to the loss."""
        items: list[LossItem] = []
        for sample, trajectory in samples:
            self._counts.add(sample, trajectory, is_replayed=is_replayed)
            used = trajectory.advantages[trajectory.loss_mask]
            has_gradient = bool(used.size and (used.any() or not self._settings.skip_zero_advantages))
            items.append(
                LossItem(
                    group_id=sample.group_id,
                    sample_index=sample.sample_index,
                    num_tokens=int(trajectory.token_ids.size),
                    num_loss_tokens=int(used.size),
                    trajectory=trajectory if has_gradient else None,
                )
            )
        return items

    def _due(self, items: Sequence[LossItem]) -> Sequence[LossItem]:
        """The items that need not wait for a fuller pack; the others wait."""
        if not self._is_streamed and not self._prior.is_needed:
            return items
        self._ready += [item for item in items if item.trajectory is None]
        arrived = [*self._waiting, *(item for item in items if item.trajectory is not None)]
        due, self._waiting = full_enough(
            arrived, lengths=[item.num_tokens for item in arrived], capacity=self._passes.round_tokens
        )
        return due

    def _prepare(self, items: Sequence[LossItem]) -> None:
        """Computes the items' gradients, or the prior log-probs that those will need."""
        if self._is_streamed:
            self._ready += [replace(item, trajectory=None) for item in items]
            self._passes.run(items, may_stop=True)
            return
        scored = iter(self._prior.of(trajectories_of(items)))
        self._ready += [item if item.trajectory is None else replace(item, trajectory=next(scored)) for item in items]

    def _optimizer_steps(self) -> StepMetrics:
        """Takes the optimiser steps; returns the metrics of the last one with the mean gradient norm.

        Source: AReaL (arXiv 2505.24298) section 5.2: PPO minibatches, with proximal log-probs recomputed when the
        global batch arrives. Difference: they are computed while it arrives, under the same weights.
        """
        minibatches = [
            minibatch
            for minibatch in split(self._ready, num_minibatches=self._settings.num_minibatches)
            if any(item.num_loss_tokens for item in minibatch)
        ]
        steps: list[StepMetrics] = []
        for number, minibatch in enumerate(minibatches, 1):
            try:
                self._passes.run(minibatch, may_stop=not steps)
                steps.append(self._optimizer_step(minibatch, is_last=number == len(minibatches)))
            except NonFiniteError as error:
                if not steps:
                    raise
                raise PartialStepError(f"in optimiser step {number} of {len(minibatches)}: {error}") from error
        return replace(steps[-1], grad_norm=statistics.fmean(step.grad_norm for step in steps))

    def _optimizer_step(self, items: Sequence[LossItem], *, is_last: bool) -> StepMetrics:
        """The step over the accumulated gradient of these items."""
        whole = divisor(
            self._settings.normalization,
            num_tokens=sum(item.num_loss_tokens for item in items),
            num_samples=sum(item.num_loss_tokens > 0 for item in items),
        )
        try:
            return self._backend.optimizer_step(divisor=whole, is_last=is_last)
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(str(error), (item.group_id for item in items)) from error
