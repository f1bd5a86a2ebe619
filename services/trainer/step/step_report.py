"""Reports on one step, counted while its samples are trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.trainer.batches.packing import Trajectory
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.model.backend import StepMetrics
from services.trainer.step.passes import Gaps, Passes
from services.trainer.step.sample_filter import SkippedSample

MAX_COMPONENTS = 32
"""Reported of a step; reward models may name others for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What one source gave to a step."""

    num_groups: int
    num_samples: int
    reward_mean: float
    pass_rate: float
    """Share of samples that passed."""
    completion_tokens_mean: float
    max_completion_tokens: int
    num_zero_variance_groups: int
    """Groups whose rewards are all equal, of one sample too."""

    def metrics(self) -> dict[str, float]:
        """By the names of metrics.jsonl, without the source's."""
        return {
            "groups": float(self.num_groups),
            "samples": float(self.num_samples),
            "reward_mean": self.reward_mean,
            "pass_rate": self.pass_rate,
            "length_mean": self.completion_tokens_mean,
            "length_max": float(self.max_completion_tokens),
            "zero_variance_share": self.num_zero_variance_groups / self.num_groups,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    optimizer: StepMetrics
    num_groups: int
    """Groups with at least one trained sample."""
    num_samples: int
    """Samples trained on, those with zero advantage included."""
    num_completion_tokens: int
    num_loss_tokens: int
    """Completion tokens that the loss covers, including skipped zero advantages and replayed samples."""
    num_replayed_samples: int
    """Samples trained on before and again here; excluded from all other numbers of samples, rewards and staleness."""
    replayed_staleness_max: int
    """In versions, by their oldest token; 0 if there are none."""
    num_forward_tokens: int
    """Tokens that went through the model for gradients: prompts included, skipped zero advantages not."""
    num_packs: int
    pack_fill: float | None
    """How full the packs were, in tokens over their budget; None when no forward pass was needed."""
    num_zero_advantage_groups: int
    """Groups whose samples all had the same reward, which have no gradient."""
    reward_mean: float
    reward_std: float
    component_means: dict[str, float]
    """By component of the reward, over the samples that have it; of at most MAX_COMPONENTS names."""
    max_completion_tokens: int
    staleness: tuple[int, ...]
    """Of each sample, in versions, by its oldest token."""
    loss_metrics: dict[str, float]
    """Per-token means and maxima, by the names of the loss; empty when every advantage was zero."""
    skipped: tuple[SkippedSample, ...]
    sources: Mapping[str, SourceReport] = field(default_factory=dict)
    """By name, of the run's sources that have one."""
    gaps: Gaps = field(default_factory=dict)
    """Of the samples that went through the model, replayed ones included; empty unless the settings keep them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The facts of a trained sample for the report; its arrays are released after their pass through the model."""

    group_id: str
    num_completion_tokens: int
    num_loss_tokens: int
    reward: float
    components: Mapping[str, float]
    staleness: int
    source: str
    """Of its prompt; empty if it has no name."""


class StepCounts:
    """The samples trained on in one step."""

    def __init__(
        self, policy_version: int, *, pass_reward: float = 1.0, source_names: Collection[str] = frozenset()
    ) -> None:
        self._policy_version = policy_version
        self._pass_reward = pass_reward
        self._source_names = source_names
        self._fresh: list[_Trained] = []
        self._replayed: list[_Trained] = []

    @property
    def num_loss_tokens(self) -> int:
        """Of all samples, replayed ones included."""
        return sum(sample.num_loss_tokens for sample in (*self._fresh, *self._replayed))

    def add(self, sample: TrainingSample, trajectory: Trajectory, *, is_replayed: bool) -> None:
        """Count a sample."""
        (self._replayed if is_replayed else self._fresh).append(
            _Trained(
                group_id=sample.group_id,
                num_completion_tokens=int(sample.completion_token_ids.size),
                num_loss_tokens=int(trajectory.loss_mask.sum()),
                reward=float(sample.reward or 0.0),
                components=sample.components,
                staleness=self._policy_version - int(sample.policy_versions.min()),
                source="" if sample.tag is None else sample.tag.source,
            )
        )

    def report(
        self,
        metrics: StepMetrics,
        passes: Passes,
        *,
        num_zero_advantage_groups: int,
        skipped: tuple[SkippedSample, ...],
    ) -> StepReport:
        """The whole step."""
        rewards = np.array([sample.reward for sample in self._fresh])
        return StepReport(
            optimizer=metrics,
            num_groups=len({sample.group_id for sample in self._fresh}),
            num_samples=len(self._fresh),
            num_completion_tokens=sum(sample.num_completion_tokens for sample in self._fresh),
            num_loss_tokens=self.num_loss_tokens,
            num_replayed_samples=len(self._replayed),
            replayed_staleness_max=max((sample.staleness for sample in self._replayed), default=0),
            num_forward_tokens=passes.num_tokens,
            num_packs=passes.num_packs,
            pack_fill=passes.num_tokens / passes.num_budgeted_tokens if passes.num_packs else None,
            num_zero_advantage_groups=num_zero_advantage_groups,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            component_means=_component_means([sample.components for sample in self._fresh]),
            max_completion_tokens=max(sample.num_completion_tokens for sample in self._fresh),
            staleness=tuple(sample.staleness for sample in self._fresh),
            loss_metrics=passes.totals.means(),
            skipped=skipped,
            sources=self._sources(),
            gaps=passes.gaps,
        )

    def _sources(self) -> dict[str, SourceReport]:
        names = dict.fromkeys(sample.source for sample in self._fresh if sample.source in self._source_names)
        return {name: self._source([sample for sample in self._fresh if sample.source == name]) for name in names}

    def _source(self, samples: Sequence[_Trained]) -> SourceReport:
        rewards: dict[str, list[float]] = {}
        for sample in samples:
            rewards.setdefault(sample.group_id, []).append(sample.reward)
        lengths = [sample.num_completion_tokens for sample in samples]
        return SourceReport(
            num_groups=len(rewards),
            num_samples=len(samples),
            reward_mean=sum(sample.reward for sample in samples) / len(samples),
            pass_rate=sum(sample.reward >= self._pass_reward for sample in samples) / len(samples),
            completion_tokens_mean=sum(lengths) / len(samples),
            max_completion_tokens=max(lengths),
            num_zero_variance_groups=sum(len(set(group)) == 1 for group in rewards.values()),
        )


def _component_means(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for components in samples:
        for name, value in components.items():
            if name in found or len(found) < MAX_COMPONENTS:
                found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}
