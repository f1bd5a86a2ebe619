"""Credit by turns: what each turn of a session earned from then on, and an advantage for each turn.

Axes: G samples of a group, T turns of a sample, L loss tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.algorithms.terms.gae import generalized_advantages

Floats = npt.NDArray[np.float64]


def turn_of_tokens(loss_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The turn of each loss token, int64[L]: a turn is a run of them."""
    begins = loss_mask & ~np.concatenate([[False], loss_mask[:-1]])
    turns: npt.NDArray[np.int64] = np.cumsum(begins)[loss_mask] - 1
    return turns


def num_turns(loss_mask: npt.NDArray[np.bool_]) -> int:
    """Runs of loss tokens."""
    return int(np.count_nonzero(loss_mask & ~np.concatenate([[False], loss_mask[:-1]])))


def returns_to_go(values: Floats, *, discount: float) -> Floats:
    """`R_t = sum over k of discount^k * r_{t+k}`, float64[T], of the turns' rewards float64[T]."""
    return generalized_advantages(values, np.zeros_like(values), discount=discount, decay=1.0)


def group_turn_advantages(
    turn_values: Sequence[Floats], estimate: Callable[[Rewards], Advantages], *, discount: float
) -> list[Advantages]:
    """An advantage for each turn of each sample of a group, float32[T] each.

    A turn's return is compared with those of the siblings that got to the same turn, by the algorithm's own formula. So
    nothing that a sample earned before a turn counts for it. Where only one sample got that far there is nothing to
    compare: its advantage there is 0. If every sample has one turn, this is the algorithm's own advantage.

    Args:
        turn_values: Of each sample what its turns earned, float64[T], T >= 0.
        estimate: The algorithm's `group_advantages`.
        discount: Of what later turns earn.
    """
    returns = [returns_to_go(values, discount=discount) for values in turn_values]
    advantages = [np.zeros(values.size, np.float32) for values in turn_values]
    for turn in range(max((values.size for values in turn_values), default=0)):
        reached = [index for index, values in enumerate(returns) if values.size > turn]
        found = estimate(np.array([returns[index][turn] for index in reached]))
        for index, advantage in zip(reached, found.tolist(), strict=True):
            advantages[index][turn] = advantage
    return advantages


def turn_critic_advantages(
    turn_values: Floats, values: Floats, turns: npt.NDArray[np.int64], *, discount: float, decay: float
) -> tuple[Floats, Floats]:
    """The advantage and the critic's target of each loss token, float64[L] both, by a critic of turns.

    A turn is one action, taken in the state before its first token: its advantage is generalised over turns, and all of
    its tokens share it and its target. If there is one turn, and `decay` is 1, this is the whole sample's reward less
    the critic's value of the prompt: the trajectory-level advantage.

    Args:
        turn_values: What each turn earned, float64[T].
        values: The critic's, of the state in which each token was sampled, float64[L].
        turns: The turn of each token, int64[L].
        discount: Of the state after a turn.
        decay: lambda, over turns.

    Source: ArCHer (arXiv 2402.19446) section 3.2: a critic of utterances over a policy of tokens, whose advantage every
    token of an utterance takes. Difference: here the critic is on-policy, with lambda-returns as targets, instead of a
    pair of critics trained off-policy on a replay buffer with target networks.
    """
    first = np.flatnonzero(np.diff(turns, prepend=-1))
    advantages = generalized_advantages(turn_values, values[first], discount=discount, decay=decay)
    return advantages[turns], (advantages + values[first])[turns]
