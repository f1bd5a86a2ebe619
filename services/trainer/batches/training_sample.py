"""A finished sample as the trainer receives it, its checks, and its token-aligned training view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.wire.routes import Routes
from penstock.wire.source_tag import SourceTag
from services.trainer.algorithms.terms.turns import num_turns
from services.trainer.batches.packing import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One finished sample as it came from the broker; P prompt tokens, C completion tokens."""

    group_id: str
    sample_index: int
    """Position among the siblings of the group."""
    prompt_token_ids: npt.NDArray[np.int32]
    """int32[P]."""
    completion_token_ids: npt.NDArray[np.int32]
    """int32[C]."""
    behavior_logprobs: npt.NDArray[np.float32]
    """float32[C], nats, as recorded when sampled."""
    policy_versions: npt.NDArray[np.int64]
    """int64[C], the version that sampled each token."""
    reward: float | None
    """The group-comparable score; None when it could not be scored."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for reports."""
    temperature: float = 1.0
    """Sampling temperature of its tokens, > 0."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """bool[C], true for trained tokens; None for all."""
    advantages: npt.NDArray[np.float32] | None = None
    """float32[C], if the sender of the sample computed them; None computes them from the group's rewards."""
    turn_values: npt.NDArray[np.float32] | None = None
    """float32[T], what each turn, a run of trained tokens, added to the reward; None if not stated."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """float32[C], nats, under the reference, if a scorer computed them."""
    tag: SourceTag | None = None
    """Where its prompt comes from, if that is recorded."""
    max_new_tokens: int | None = None
    """The limit under which it was sampled; None is the run's."""
    routes: Routes | None = None
    """[P + C - 1, layers, experts_per_token], the experts of each position but the last; None if none are replayed."""


def is_well_formed(sample: TrainingSample, vocab_size: int) -> bool:
    """Whether arrays line up, token ids exist in the vocabulary, and numbers are numbers.

    Samples come over the network, so nothing about them is assumed.
    """
    shape = sample.completion_token_ids.shape
    aligned: list[npt.NDArray[Any]] = [sample.behavior_logprobs, sample.policy_versions]
    optional = (sample.loss_mask, sample.advantages, sample.reference_logprobs)
    aligned += [array for array in optional if array is not None]
    if len(shape) != 1 or shape[0] == 0 or sample.prompt_token_ids.ndim != 1 or sample.prompt_token_ids.size == 0:
        return False
    if any(array.shape != shape for array in aligned):
        return False
    ids = (sample.prompt_token_ids, sample.completion_token_ids)
    if any(int(array.min()) < 0 or int(array.max()) >= vocab_size for array in ids):
        return False
    mask, turn_values = sample.loss_mask, sample.turn_values
    if turn_values is not None and turn_values.size != (1 if mask is None else num_turns(mask)):
        return False
    numbers = (sample.behavior_logprobs, sample.advantages, sample.reference_logprobs, turn_values)
    is_finite = all(bool(np.isfinite(array).all()) for array in numbers if array is not None)
    return is_finite and (sample.reward is None or bool(np.isfinite(sample.reward)))


def trajectory_of(sample: TrainingSample, advantage: float) -> Trajectory:
    """The training view of a well-formed sample: `advantage` on every completion token unless it has its own."""
    num_prompt, num_completion = sample.prompt_token_ids.size, sample.completion_token_ids.size
    nothing = np.zeros(num_prompt, dtype=np.float32)
    mask = np.ones(num_completion, dtype=np.bool_) if sample.loss_mask is None else sample.loss_mask
    advantages, reference = sample.advantages, sample.reference_logprobs
    if advantages is None:
        advantages = np.full(num_completion, advantage, dtype=np.float32)
    return Trajectory(
        token_ids=np.concatenate([sample.prompt_token_ids, sample.completion_token_ids]),
        loss_mask=np.concatenate([nothing.astype(np.bool_), mask.astype(np.bool_)]),
        behavior_logprobs=np.concatenate([nothing, sample.behavior_logprobs]),
        advantages=np.concatenate([nothing, advantages]),
        reference_logprobs=None if reference is None else np.concatenate([nothing, reference]),
        temperature=sample.temperature,
        group_id=sample.group_id,
        # Nothing is predicted from the last position, so that any experts do there.
        routes=None if sample.routes is None else np.concatenate([sample.routes, sample.routes[-1:]]),
    )
