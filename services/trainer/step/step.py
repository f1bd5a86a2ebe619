"""One step of a run: groups of scored samples in, passes through the model as they arrive, optimiser steps at the end.

    open --add_groups--> open --finish---> closed   (the optimiser steps of the batch were taken, one or several)
                         open --abandon--> closed   (gradients discarded, nothing changed)

Invariants:
- A sample is trained on only if it is scored, well formed, within the staleness bound and its group is new to this
  step; whatever is left out is named with its reason, never silently dropped.
- Advantages use exactly the samples of the group (for some algorithms: of the step) that are trained on. Where they use
  the step, the forward passes are made in `finish`.
- Forward passes begin with the first pack that fills; what does not fill one waits for the next groups or for `finish`.
- The gradient of an optimiser step is that of all its tokens at once, however the groups were split over `add_groups`
  calls.
- A zero advantage contributes nothing to the gradient when no KL term does, so such samples skip the forward pass but
  count as trained: the same update for less work. Loss metrics then cover the other samples' tokens only.
- A backend error closes the step. Where a number is not finite nothing has changed, and it names the groups that may be
  at fault: those of the packs of that forward pass, or all of the optimiser step where only the summed gradient shows
  it. After the first of several optimiser steps it is a PartialStepError instead: training must not go on from there.
  Calling off, which `compute.py` does, never falls between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np

from services.trainer.batches.packing import Trajectory
from services.trainer.batches.training_sample import TrainingSample, is_well_formed
from services.trainer.model.backend import Backend, BackendError, StepMetrics
from services.trainer.step.advantages import CreditedSample, Creditor
from services.trainer.step.optimizer_steps import Lesson, updates_of
from services.trainer.step.step_settings import StepSettings

_Result = TypeVar("_Result")


class SkipReason(StrEnum):
    """Why a sample was not trained on."""

    UNSCORED = "unscored"
    STALE = "stale"
    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSample:
    """A sample that was left out."""

    group_id: str
    sample_index: int
    reason: SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchReport:
    """What one `add_groups` call did."""

    num_trained: int
    """Samples accepted."""
    num_packs: int
    """Passes made for gradients: of packs that are full, with samples of earlier calls in them."""
    skipped: tuple[SkippedSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    optimizer: StepMetrics
    num_groups: int
    """Groups with at least one trained sample."""
    num_samples: int
    """Samples trained on, those with zero advantage included."""
    num_prompt_tokens: int
    num_completion_tokens: int
    num_loss_tokens: int
    """Completion tokens that the loss covers, of skipped zero advantages and of replayed samples too."""
    num_replayed_samples: int
    """Trained on before and again here; left out of all other numbers of samples, rewards and staleness."""
    replayed_staleness_max: int
    """In versions, by their oldest token; 0 without any."""
    num_forward_tokens: int
    """Tokens that went through the model for gradients: prompts included, skipped zero advantages not."""
    num_packs: int
    pack_fill: float | None
    """How full the packs were, in tokens over their budget; None when no forward pass was needed."""
    num_zero_advantage_groups: int
    """Groups whose samples all had the same reward, which teach nothing."""
    reward_mean: float
    reward_std: float
    max_completion_tokens: int
    staleness_mean: float
    """In versions, by the oldest token of each sample."""
    staleness_max: int
    min_policy_version: int
    loss_metrics: dict[str, float]
    """Per-token means and maxima, by the names of the loss; empty when every advantage was zero."""
    skipped: tuple[SkippedSample, ...]


class EmptyStepError(Exception):
    """A step was to finish without a single trained token."""


class StepClosedError(Exception):
    """The step was finished or abandoned before."""


class TrainingStep:
    """Accumulates one optimiser step on a backend."""

    def __init__(self, backend: Backend, settings: StepSettings) -> None:
        """Opens a step; the backend must hold no gradients of another one."""
        self._backend = backend
        self._settings = settings
        self._creditor = Creditor(backend, settings)
        self._is_open = True
        self._group_ids: set[str] = set()
        self._samples: list[_Accepted] = []
        self._replayed: list[_Accepted] = []
        self._skipped: list[SkippedSample] = []
        self._updates = updates_of(backend, settings)

    @property
    def num_groups(self) -> int:
        """Groups seen so far, those without a trained sample included."""
        return len(self._group_ids)

    def add_groups(self, groups: Sequence[Sequence[TrainingSample]]) -> MicrobatchReport:
        """Takes whole groups, and runs forward and backward on what fills packs.

        Args:
            groups: each the samples of one prompt that can be used; more groups a call fill packs better.

        Raises:
            StepClosedError: the step is over.
            BackendError: a loss was not finite; the step is abandoned.
        """
        return self._add(groups, is_replayed=False)

    def add_replayed(self, groups: Sequence[Sequence[TrainingSample]]) -> MicrobatchReport:
        """Runs forward and backward on groups that an earlier step trained on, for an algorithm that allows it.

        No staleness bounds them here: whoever keeps them does. They count in the gradient, its divisor and the numbers
        of replayed samples, and in nothing else that the report says of samples.

        Raises:
            ValueError: the algorithm is not right for samples of any policy.
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
            PartialStepError: the same after the first of several optimiser steps; the weights are of no version.
            StepClosedError: the step is over.
        """
        self._require_open()
        rest = self._lessons(self._creditor.credit_rest, is_replayed=False)
        every = [*self._samples, *self._replayed]
        num_loss_tokens = sum(sample.num_loss_tokens for sample in every)
        if num_loss_tokens == 0:
            self.abandon()
            raise EmptyStepError(f"none of {len(self._group_ids)} groups had a token to train on")
        metrics = self._or_abandon(partial(self._updates.finish, rest))
        self._is_open = False
        return self._report(metrics, num_loss_tokens)

    def abandon(self) -> None:
        """Discards the accumulated gradients; harmless on a closed step."""
        if self._is_open:
            self._is_open = False
            self._backend.discard_gradients()

    def _add(self, groups: Sequence[Sequence[TrainingSample]], *, is_replayed: bool) -> MicrobatchReport:
        self._require_open()
        num_skipped = len(self._skipped)
        usable = [samples for group in groups if (samples := self._usable(group, is_replayed=is_replayed))]
        lessons = self._lessons(partial(self._creditor.credit, usable), is_replayed=is_replayed)
        return MicrobatchReport(
            num_packs=self._or_abandon(partial(self._updates.add, lessons)),
            num_trained=sum(map(len, usable)),
            skipped=tuple(self._skipped[num_skipped:]),
        )

    def _or_abandon(self, work: Callable[[], _Result]) -> _Result:
        """A backend error abandons the step."""
        try:
            return work()
        except BackendError:
            self.abandon()
            raise

    def _require_open(self) -> None:
        if not self._is_open:
            raise StepClosedError("this step was finished or abandoned")

    def _usable(self, group: Sequence[TrainingSample], *, is_replayed: bool) -> list[TrainingSample]:
        """The samples of one group that can be trained on; the others are noted with their reasons."""
        if not group:
            return []
        group_id = group[0].group_id
        is_duplicate = group_id in self._group_ids
        self._group_ids.add(group_id)
        usable: list[TrainingSample] = []
        for sample in group:
            reason = SkipReason.DUPLICATE if is_duplicate else self._skip_reason(sample, group_id, usable)
            if is_replayed and reason is SkipReason.STALE:
                reason = None
            if reason is None:
                usable.append(sample)
            else:
                self._skipped.append(
                    SkippedSample(group_id=sample.group_id, sample_index=sample.sample_index, reason=reason)
                )
        return usable

    def _lessons(self, credit: Callable[[], list[CreditedSample]], *, is_replayed: bool) -> list[Lesson]:
        """Notes credited samples for the report; returns them as the optimiser sees them."""
        credited = self._or_abandon(credit)
        lessons: list[Lesson] = []
        for sample, trajectory in credited:
            (self._replayed if is_replayed else self._samples).append(_accepted(sample, trajectory))
            used = trajectory.advantages[trajectory.loss_mask]
            has_gradient = bool(used.size and (used.any() or not self._settings.skip_zero_advantages))
            lessons.append(
                Lesson(
                    group_id=sample.group_id,
                    num_tokens=int(trajectory.token_ids.size),
                    num_loss_tokens=int(used.size),
                    trajectory=trajectory if has_gradient else None,
                )
            )
        return lessons

    def _skip_reason(
        self, sample: TrainingSample, group_id: str, siblings: Sequence[TrainingSample]
    ) -> SkipReason | None:
        if sample.reward is None:
            return SkipReason.UNSCORED
        if sample.group_id != group_id or not is_well_formed(sample, self._backend.vocab_size):
            return SkipReason.MALFORMED
        if any(sample.sample_index == sibling.sample_index for sibling in siblings):
            return SkipReason.DUPLICATE
        if sample.prompt_token_ids.size + sample.completion_token_ids.size > self._backend.max_sequence_length:
            return SkipReason.TOO_LONG
        if self._settings.policy_version - int(sample.policy_versions.min()) > self._settings.max_staleness:
            return SkipReason.STALE
        return None

    def _report(self, metrics: StepMetrics, num_loss_tokens: int) -> StepReport:
        rewards = np.array([sample.reward for sample in self._samples])
        versions = np.array([sample.min_policy_version for sample in self._samples])
        staleness = self._settings.policy_version - versions
        passes = self._updates.passes
        return StepReport(
            optimizer=metrics,
            num_groups=len({sample.group_id for sample in self._samples}),
            num_samples=len(self._samples),
            num_prompt_tokens=sum(sample.num_prompt_tokens for sample in self._samples),
            num_completion_tokens=sum(sample.num_completion_tokens for sample in self._samples),
            num_loss_tokens=num_loss_tokens,
            num_replayed_samples=len(self._replayed),
            replayed_staleness_max=max(
                (self._settings.policy_version - sample.min_policy_version for sample in self._replayed), default=0
            ),
            num_forward_tokens=passes.num_tokens,
            num_packs=passes.num_packs,
            pack_fill=passes.num_tokens / passes.num_budgeted_tokens if passes.num_packs else None,
            num_zero_advantage_groups=self._creditor.num_zero_advantage_groups,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            max_completion_tokens=max(sample.num_completion_tokens for sample in self._samples),
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            min_policy_version=int(versions.min()),
            loss_metrics=passes.totals.means(),
            skipped=tuple(self._skipped),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accepted:
    """What the report needs of a trained sample; its arrays are let go once it went through the model."""

    group_id: str
    num_prompt_tokens: int
    num_completion_tokens: int
    num_loss_tokens: int
    reward: float
    min_policy_version: int


def _accepted(sample: TrainingSample, trajectory: Trajectory) -> _Accepted:
    return _Accepted(
        group_id=sample.group_id,
        num_prompt_tokens=int(sample.prompt_token_ids.size),
        num_completion_tokens=int(sample.completion_token_ids.size),
        num_loss_tokens=int(trajectory.loss_mask.sum()),
        reward=float(sample.reward or 0.0),
        min_policy_version=int(sample.policy_versions.min()),
    )
