"""One optimiser step: groups of scored samples in, gradients accumulated as they arrive, one step at the end.

    open --add_groups--> open --finish---> closed   (a step was taken)
                         open --abandon--> closed   (gradients discarded, nothing changed)

Invariants:
- A sample is trained on only if it is scored, well formed, within the staleness bound and its group is new to this
  step; whatever is left out is named with its reason, never silently dropped.
- Advantages use exactly the samples of the group (for some algorithms: of the step) that are trained on. Where they use
  the step, the forward passes are made in `finish`.
- The gradient is that of the whole step's tokens at once, however the groups were split over `add_groups` calls.
- A zero advantage contributes nothing to the gradient when no KL term does, so such samples skip the forward pass but
  count as trained: the same update for less work. Loss metrics then cover the other samples' tokens only.
- A backend error closes the step with nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from services.trainer.algorithms.base import Advantages, Algorithm, Normalization, divisor
from services.trainer.algorithms.overlong import overlong_penalties
from services.trainer.backend import Backend, BackendError, LossTotals, StepMetrics
from services.trainer.config import TrainingConfig
from services.trainer.packing import Trajectory, pack_trajectories
from services.trainer.samples import TrainingSample, is_well_formed, trajectory_of


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
class StepSettings:
    """What a step needs to know besides the data."""

    policy_version: int
    """The version of the weights being trained."""
    max_staleness: int
    """Most versions a sample's oldest token may lag behind `policy_version`."""
    max_pack_tokens: int
    """Token budget of one forward pass."""
    algorithm: Algorithm
    """How rewards become advantages."""
    normalization: Normalization
    """What the gradient is divided by."""
    max_new_tokens: int = 1
    """Most completion tokens that sampling allows; read where `overlong_buffer_tokens` is set."""
    overlong_buffer_tokens: int = 0
    """The reward falls over the last so many of them; 0 punishes no length."""
    skip_zero_advantages: bool = True
    """Must be False when the loss has a term without advantages (a KL to a reference)."""


def step_settings(config: TrainingConfig, algorithm: Algorithm, *, policy_version: int) -> StepSettings:
    """A run's settings for the step from `policy_version`."""
    settings = config.algorithm
    return StepSettings(
        policy_version=policy_version,
        max_staleness=settings.max_staleness,
        max_pack_tokens=config.trainer.tokens_per_pack,
        algorithm=algorithm,
        normalization=settings.normalization or algorithm.normalization,
        max_new_tokens=config.sampling.max_new_tokens,
        overlong_buffer_tokens=settings.overlong_buffer_tokens,
        skip_zero_advantages=settings.kl_coefficient == 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchReport:
    """What one `add_groups` call did."""

    num_trained: int
    """Samples accepted."""
    num_packs: int
    """Forward passes made."""
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
    """Completion tokens that the loss covers, of skipped zero advantages too."""
    num_forward_tokens: int
    """Tokens that went through the model: prompts included, skipped zero advantages not."""
    num_packs: int
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
        self._is_open = True
        self._group_ids: set[str] = set()
        self._samples: list[_Accepted] = []
        self._held: list[TrainingSample] = []
        self._skipped: list[SkippedSample] = []
        self._num_zero_advantage_groups = 0
        self._num_forward_tokens = 0
        self._num_packs = 0
        self._totals = LossTotals()

    @property
    def num_groups(self) -> int:
        """Groups seen so far, those without a trained sample included."""
        return len(self._group_ids)

    def add_groups(self, groups: Sequence[Sequence[TrainingSample]]) -> MicrobatchReport:
        """Runs forward and backward on whole groups.

        Args:
            groups: each the samples of one prompt that can be used; more groups a call fill packs better.

        Raises:
            StepClosedError: the step is over.
            BackendError: a loss was not finite; the step is abandoned.
        """
        self._require_open()
        trajectories: list[Trajectory] = []
        num_trained, num_skipped = len(self._samples) + len(self._held), len(self._skipped)
        estimate = self._settings.algorithm.group_advantages
        for group in groups:
            usable = self._usable(group)
            if not usable:
                continue
            if estimate is None:
                self._held += usable
            else:
                credits = estimate(self._rewards(usable))
                self._num_zero_advantage_groups += not credits.any()
                trajectories += self._credited(usable, credits)
        return MicrobatchReport(
            num_packs=self._forward_backward(trajectories),
            num_trained=len(self._samples) + len(self._held) - num_trained,
            skipped=tuple(self._skipped[num_skipped:]),
        )

    def finish(self) -> StepReport:
        """Takes the optimiser step over everything added.

        Raises:
            EmptyStepError: no token was accepted; the step is abandoned, the weights are unchanged.
            BackendError: the gradient was not finite; the step is abandoned, the weights are unchanged.
            StepClosedError: the step is over.
        """
        self._require_open()
        self._credit_held()
        num_loss_tokens = sum(sample.num_loss_tokens for sample in self._samples)
        if num_loss_tokens == 0:
            self.abandon()
            raise EmptyStepError(f"none of {len(self._group_ids)} groups had a token to train on")
        try:
            metrics = self._backend.optimizer_step(
                divisor=divisor(
                    self._settings.normalization,
                    num_tokens=num_loss_tokens,
                    num_samples=sum(sample.num_loss_tokens > 0 for sample in self._samples),
                )
            )
        except BackendError:
            self.abandon()
            raise
        self._is_open = False
        return self._report(metrics, num_loss_tokens)

    def abandon(self) -> None:
        """Discards the accumulated gradients; harmless on a closed step."""
        if self._is_open:
            self._is_open = False
            self._backend.discard_gradients()

    def _require_open(self) -> None:
        if not self._is_open:
            raise StepClosedError("this step was finished or abandoned")

    def _usable(self, group: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The samples of one group that can be trained on; the others are noted with their reasons."""
        if not group:
            return []
        group_id = group[0].group_id
        is_duplicate = group_id in self._group_ids
        self._group_ids.add(group_id)
        usable: list[TrainingSample] = []
        for sample in group:
            reason = SkipReason.DUPLICATE if is_duplicate else self._skip_reason(sample, group_id, usable)
            if reason is None:
                usable.append(sample)
            else:
                self._skipped.append(
                    SkippedSample(group_id=sample.group_id, sample_index=sample.sample_index, reason=reason)
                )
        return usable

    def _rewards(self, samples: Sequence[TrainingSample]) -> npt.NDArray[np.float64]:
        """What the credit of samples is made from, float64[len(samples)]."""
        rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
        penalties: npt.NDArray[np.float64] = overlong_penalties(
            np.array([sample.completion_token_ids.size for sample in samples], dtype=np.int64),
            max_tokens=self._settings.max_new_tokens,
            buffer_tokens=self._settings.overlong_buffer_tokens,
        )
        return rewards + penalties

    def _credit_held(self) -> None:
        """Runs forward and backward on samples whose credit depends on the whole step."""
        held, self._held = self._held, []
        estimate = self._settings.algorithm.step_advantages
        if estimate is not None and held:
            self._forward_backward(self._credited(held, estimate(self._rewards(held))))

    def _forward_backward(self, trajectories: Sequence[Trajectory]) -> int:
        """Accumulates their gradient; returns the forward passes made. A backend error abandons the step."""
        packs = pack_trajectories(trajectories, max_pack_tokens=self._settings.max_pack_tokens)
        for pack in packs:
            try:
                self._totals = self._totals.merged(self._backend.forward_backward(pack))
            except BackendError:
                self.abandon()
                raise
            self._num_forward_tokens += pack.num_tokens
        self._num_packs += len(packs)
        return len(packs)

    def _credited(self, samples: Sequence[TrainingSample], credits: Advantages) -> list[Trajectory]:
        """Counts samples as trained; returns those that need a forward pass."""
        trajectories: list[Trajectory] = []
        for sample, credit in zip(samples, credits.tolist(), strict=True):
            trajectory = trajectory_of(sample, credit)
            self._samples.append(_accepted(sample, trajectory))
            used = trajectory.advantages[trajectory.loss_mask]
            if used.size and (used.any() or not self._settings.skip_zero_advantages):
                trajectories.append(trajectory)
        return trajectories

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
        return StepReport(
            optimizer=metrics,
            num_groups=len({sample.group_id for sample in self._samples}),
            num_samples=len(self._samples),
            num_prompt_tokens=sum(sample.num_prompt_tokens for sample in self._samples),
            num_completion_tokens=sum(sample.num_completion_tokens for sample in self._samples),
            num_loss_tokens=num_loss_tokens,
            num_forward_tokens=self._num_forward_tokens,
            num_packs=self._num_packs,
            num_zero_advantage_groups=self._num_zero_advantage_groups,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            max_completion_tokens=max(sample.num_completion_tokens for sample in self._samples),
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            min_policy_version=int(versions.min()),
            loss_metrics=self._totals.means(),
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
