"""Trajectory balance: a squared error that is valid for samples of any policy, so old ones need no correction.

The objective, for K samples of a prompt with rewards r_j, beta the KL coefficient:

    L = mean_j (log Z + log pi(y_j) - log pi_ref(y_j) - r_j / beta)^2
    log Z = mean_j (log pi_ref(y_j) - log pi(y_j) + r_j / beta), without gradient

Its gradient is `-2 / (K beta) * sum_j A_j * grad log pi(y_j)` with `A_j = s_j - mean s` and
`s_j = r_j - beta * (log pi(y_j) - log pi_ref(y_j))`: the log-prob of a completion, weighted by its reward less KL
against its group's. That is how it is computed here, times beta / 2, which scales the loss, moves no minimum and keeps
it finite for a small beta. Exact for one optimiser step a batch, where pi is the policy that the gradient is taken at.

Source: TBA (arXiv 2503.18929) section 3, the VarGrad estimate of log Z.
"""

from __future__ import annotations

from services.trainer.algorithms.base import Algorithm, Clip, Normalization, Surrogate, TokenTerms
from services.trainer.algorithms.dr_grpo import group_advantages


def weighed_logprobs(terms: TokenTerms, clip: Clip) -> Surrogate:
    """Per token `-A * log pi`; no ratio to any other policy, and `clip` is not read."""
    return Surrogate(losses=-terms.advantages * terms.logprobs)


TBA = Algorithm(
    name="tba",
    group_advantages=group_advantages,
    is_kl_in_reward=True,
    is_off_policy=True,
    needs_kl=True,
    surrogate=weighed_logprobs,
    clip=Clip(low=1.0, high=0.0),
    normalization=Normalization.SEQUENCES,
)
