"""On-policy distillation: the student samples, and a teacher says of each token how much likelier it finds it.

With x_t sampled by the student pi from a prompt, T the teacher and beta the KL coefficient, a token's advantage is

    beta * (log T(x_t) - log pi(x_t))

which is minus the per-token reverse KL, KL(pi, T), estimated at the sampled token, with a discount of 0: a token
answers for itself, not for what follows it. Its policy gradient is the gradient of that KL, in the states that the
student visits. The teacher is the run's reference, computed by scorers; log pi is that of the weights being trained
(`Algorithm.is_kl_in_advantage`), so that samples of older weights need no more than the run's correction.

Sources: GKD (arXiv 2306.13649), on-policy samples with the reverse KL; MiniLLM (arXiv 2306.08543), its policy gradient;
Thinking Machines Lab, "On-Policy Distillation" (2025), the advantage and the discount. Differences: GKD sums the
divergence over the vocabulary, for which a teacher would have to send all of its logits; MiniLLM also counts the KL of
later tokens, which the discount drops.
"""

from __future__ import annotations

import numpy as np

from services.trainer.algorithms.base import Advantages, Algorithm, Clip, Normalization, Rewards
from services.trainer.algorithms.grpo import centered_rewards, group_advantages
from services.trainer.algorithms.terms.surrogates import clipped


def no_advantages(rewards: Rewards) -> Advantages:
    """Zeros, float32[G]: rewards are reported and teach nothing; raises as those that do."""
    return np.zeros_like(centered_rewards(rewards), dtype=np.float32)


DISTILL = Algorithm(
    name="distill",
    group_advantages=no_advantages,
    needs_siblings=False,
    is_kl_in_advantage=True,
    needs_kl=True,
    needs_teacher=True,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.TOKENS,
)

DISTILL_WITH_REWARD = Algorithm(
    name="distill_with_reward",
    # Added to the teacher's, the same for all tokens of a sample.
    group_advantages=group_advantages,
    is_kl_in_advantage=True,
    needs_kl=True,
    needs_teacher=True,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.TOKENS,
)
