"""Generalised advantage estimation: an advantage for each token from rewards and a critic's values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def generalized_advantages(rewards: Floats, values: Floats, *, discount: float, decay: float) -> Floats:
    """`A_t = sum over k of (discount * decay)^k * d_{t+k}`, `d_t = r_t + discount * V_{t+1} - V_t`, float64[C].

    The completion ends the episode: the value after its last token is 0. The critic's target is
    `A_t + V_t`.

    Args:
        rewards: float64[C], of each token.
        values: float64[C], of the state in which each token was sampled.
        discount: gamma, of later rewards.
        decay: lambda: 1 trusts rewards alone (no bias), 0 the critic's next value alone (least variance).

    Source: GAE (arXiv 1506.02438) eq. 16.
    """
    later_values = np.append(values[1:], 0.0)
    return _discounted_suffix_sums(rewards + discount * later_values - values, discount * decay)


def _discounted_suffix_sums(terms: Floats, discount: float) -> Floats:
    """`s_t = sum over k of discount^k * terms_{t+k}`, by doubling: log2(C) passes, no loop over tokens."""
    sums = terms.astype(np.float64)
    reach, factor = 1, discount
    while reach < sums.size:
        # Every sum now covers `reach` terms; that of `reach` tokens later covers the next ones.
        sums[:-reach] += factor * sums[reach:]
        reach, factor = 2 * reach, factor * factor
    return sums


def normalized(advantages: Floats, *, eps: float = 1e-8) -> Floats:
    """Centred and divided by their deviation, over all tokens of a step, float64[N].

    Source: the usual practice of PPO, not in its paper: Huang et al., "The 37 Implementation Details of PPO" (2022), 7.
    """
    result: Floats = (advantages - advantages.mean()) / (advantages.std() + eps)
    return result
