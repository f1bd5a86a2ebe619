"""Computes each token's advantage from rewards: by group, by step, or by a critic.

Invariants:
- Advantages use exactly the samples that are trained on; which groups arrived together affects only rounding.
- If they need more than rewards (a critic's values, a KL to the reference), forward passes without gradient are made as
  samples arrive. If they need the whole step, prior log-probs are computed as samples arrive, too (`PriorLogprobs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.algorithms.terms.gae import generalized_advantages, normalized
from services.trainer.algorithms.terms.overlong import overlong_penalties
from services.trainer.algorithms.terms.turns import group_turn_advantages, turn_critic_advantages, turn_of_tokens
from services.trainer.batches.packing import Trajectory, full_enough
from services.trainer.batches.training_sample import TrainingSample, trajectory_of
from services.trainer.model.backend import Quantity
from services.trainer.step.prior_passes import PriorLogprobs, Scores, Scoring
from services.trainer.step.step_settings import StepSettings

DISCOUNT = 1.0
"""Gamma of a critic's advantages: the length of an answer does not change its value."""
_ROUNDING = 1e-5
Floats = npt.NDArray[np.float64]


class TrainableSample(NamedTuple):
    """A sample that can be trained on."""

    sample: TrainingSample
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """A sample before its advantages; L loss tokens."""

    sample: TrainingSample
    blank: Trajectory
    """Without advantages, unless the sample has its own."""
    reward: float
    token_kl: Floats
    """float64[L], coefficient times log-ratio to the reference, to be subtracted from the rewards."""
    values: Floats
    """float64[L], the critic's; zeros without one."""

    @property
    def turn_values(self) -> Floats:
        """What each turn earned, less its tokens' KL, float64[T]; all of it at the end unless the sample says."""
        turns = turn_of_tokens(self.blank.loss_mask)
        if not turns.size:
            return np.zeros(0)
        values: Floats = -np.bincount(turns, weights=self.token_kl).astype(np.float64)
        stated, rest = self.sample.turn_values, self.reward
        if stated is not None:
            values += stated
            rest -= float(stated.sum(dtype=np.float64))
        # Beyond the stated turns there may be a penalty of length, but not what rounds off in float32.
        if abs(rest) > _ROUNDING * max(1.0, abs(self.reward)):
            values[-1] += rest
        return values


class AdvantageEstimator:
    """Gives the samples of one step their advantages."""

    def __init__(self, scoring: Scoring, settings: StepSettings, *, prior: PriorLogprobs) -> None:
        self._scoring = scoring
        self._settings = settings
        self._prior = prior
        self._quantities: list[Quantity] = ["values"] if settings.algorithm.has_critic else []
        if settings.reward_kl_coefficient > 0.0:
            self._quantities += ["logprobs"] if settings.brings_reference else ["logprobs", "reference_logprobs"]
        self._arrived: list[_Scored] = []
        """Samples whose prior log-probs wait for a full pack."""
        self._held: list[_Scored] = []
        self.num_zero_advantage_groups = 0
        """Groups whose advantages were all zero, if computed by group."""

    def add(self, groups: Sequence[Sequence[TrainingSample]]) -> list[TrainableSample]:
        """Takes the samples of whole groups, none empty; returns those whose advantages do not need the rest.

        Raises:
            BackendError: The model or the critic failed.
        """
        estimate = self._settings.algorithm.group_advantages
        scored = iter(self._scored([sample for group in groups for sample in group]))
        ready: list[TrainableSample] = []
        for group in groups:
            siblings = [next(scored) for _ in group]
            if estimate is None:
                self._arrived += siblings
                continue
            if self._settings.turn_discount is not None:
                found, is_zero = _with_turn_advantages(siblings, estimate, discount=self._settings.turn_discount)
            else:
                advantages = estimate(_penalised(siblings))
                found, is_zero = _with_advantages(siblings, advantages), not advantages.any()
            self.num_zero_advantage_groups += is_zero
            ready += found
        if self._arrived:
            self._score_prior(is_last=False)
        return ready

    def rest(self) -> list[TrainableSample]:
        """The samples whose advantages depend on the whole step."""
        self._score_prior(is_last=True)
        held, self._held = self._held, []
        algorithm = self._settings.algorithm
        if not held:
            return []
        if algorithm.step_advantages is not None:
            return _with_advantages(held, algorithm.step_advantages(_penalised(held)))
        return self._by_critic(held)

    def _score_prior(self, *, is_last: bool) -> None:
        """Computes the prior log-probs of full packs, and at the end of the last ones."""
        due, self._arrived = self._arrived, []
        if self._prior.is_needed and not is_last:
            lengths = [int(scored.blank.token_ids.size) for scored in due]
            due, self._arrived = full_enough(due, lengths=lengths, capacity=self._scoring.round_tokens)
        trajectories = self._prior.of([scored.blank for scored in due])
        self._held += [replace(scored, blank=trajectory) for scored, trajectory in zip(due, trajectories, strict=True)]

    def _scored(self, samples: Sequence[TrainingSample]) -> list[_Scored]:
        blanks = [trajectory_of(sample, 0.0) for sample in samples]
        longest = [sample.max_new_tokens or self._settings.max_new_tokens for sample in samples]
        penalties = overlong_penalties(
            np.array([sample.completion_token_ids.size for sample in samples], dtype=np.int64),
            max_tokens=np.array(longest, dtype=np.int64),
            buffer_tokens=self._settings.overlong_buffer_tokens,
        )
        scores = self._scoring.of(blanks, self._quantities)
        return [
            _Scored(
                sample=sample,
                blank=blank,
                reward=float(sample.reward or 0.0) + float(penalty),
                token_kl=self._token_kl(blank, found),
                values=found["values"].astype(np.float64) if "values" in found else _zeros(blank),
            )
            for sample, blank, penalty, found in zip(samples, blanks, penalties, scores, strict=True)
        ]

    def _token_kl(self, blank: Trajectory, found: Scores) -> Floats:
        if self._settings.reward_kl_coefficient == 0.0:
            return _zeros(blank)
        reference = found.get("reference_logprobs")
        if reference is None:
            assert blank.reference_logprobs is not None
            reference = blank.reference_logprobs[blank.loss_mask]
        log_ratios = found["logprobs"] - reference
        return self._settings.reward_kl_coefficient * log_ratios.astype(np.float64)

    def _by_critic(self, held: Sequence[_Scored]) -> list[TrainableSample]:
        """Generalised advantages of every token, normalised over the step, and the critic's targets.

        A sample without loss tokens counts but contributes nothing, as elsewhere.
        """
        raw, targets = zip(*[self._advantages(scored) for scored in held], strict=True)
        every = np.concatenate(raw)
        whole = np.split(normalized(every) if every.size else every, np.cumsum([each.size for each in raw])[:-1])
        return [
            TrainableSample(scored.sample, _by_token(scored, advantages, returns=target))
            for scored, advantages, target in zip(held, whole, targets, strict=True)
        ]

    def _advantages(self, scored: _Scored) -> tuple[Floats, Floats]:
        """Of each loss token the advantage and the critic's target."""
        decay, turn_discount = self._settings.gae_lambda, self._settings.turn_discount
        if turn_discount is not None and scored.values.size:
            turns = turn_of_tokens(scored.blank.loss_mask)
            return turn_critic_advantages(scored.turn_values, scored.values, turns, discount=turn_discount, decay=decay)
        rewards = -scored.token_kl
        if rewards.size:
            rewards[-1] += scored.reward
        advantages = generalized_advantages(rewards, scored.values, discount=DISCOUNT, decay=decay)
        return advantages, advantages + scored.values


def _zeros(blank: Trajectory) -> Floats:
    return np.zeros(int(blank.loss_mask.sum()))


def _penalised(samples: Sequence[_Scored]) -> Rewards:
    """Rewards less their completions' KL, float64[len(samples)]."""
    return np.array([scored.reward - scored.token_kl.sum() for scored in samples], dtype=np.float64)


def _with_advantages(samples: Sequence[_Scored], advantages: npt.NDArray[np.float32]) -> list[TrainableSample]:
    """Each sample's advantage on all of its tokens, unless it has its own."""
    return [
        TrainableSample(
            scored.sample, replace(scored.blank, advantages=trajectory_of(scored.sample, advantage).advantages)
        )
        for scored, advantage in zip(samples, advantages.tolist(), strict=True)
    ]


def _with_turn_advantages(
    samples: Sequence[_Scored], estimate: Callable[[Rewards], Advantages], *, discount: float
) -> tuple[list[TrainableSample], bool]:
    """Each turn's advantage on its tokens, unless a sample has its own; and whether all of a group are zero."""
    found = group_turn_advantages([scored.turn_values for scored in samples], estimate, discount=discount)
    trained = [
        TrainableSample(scored.sample, _with_own(scored, advantages[turn_of_tokens(scored.blank.loss_mask)]))
        for scored, advantages in zip(samples, found, strict=True)
    ]
    return trained, not any(advantages.any() for advantages in found)


def _with_own(scored: _Scored, advantages: Advantages) -> Trajectory:
    blank = scored.blank
    return blank if scored.sample.advantages is not None else replace(blank, advantages=blank.spread(advantages))


def _by_token(scored: _Scored, advantages: Floats, *, returns: Floats) -> Trajectory:
    """The trajectory with an advantage for each token, unless the sample has its own."""
    blank = scored.blank
    return replace(
        _with_own(scored, advantages.astype(np.float32)),
        values=blank.spread(scored.values),
        returns=blank.spread(returns),
    )
