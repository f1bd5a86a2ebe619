"""Group-relative advantages: the credit that the loss gives to every token of a sample.

Invariants:
- Only the rewards of one sample group enter one call; groups never share statistics.
- A group whose rewards are all equal gets exactly zero everywhere, whatever rounding its mean suffers, so that
  callers may skip such samples (`TrainingStep` does) without changing the gradient.
"""

import numpy as np
import numpy.typing as npt


def group_advantages(
    rewards: npt.NDArray[np.float64], *, normalize_std: bool = True, eps: float = 1e-6
) -> npt.NDArray[np.float32]:
    """Credits each sample of a group by its reward against the group's mean.

    Args:
        rewards: float64[G], the finite scores of the siblings of one prompt.
        normalize_std: divide by the group's population standard deviation (GRPO) or leave the scale alone
            (Dr. GRPO, which shows that the division favours too easy and too hard prompts).
        eps: added to the standard deviation; in units of reward.

    Returns:
        float32[G], one advantage a sample; zeros when all rewards are equal.

    Raises:
        ValueError: `rewards` is not one-dimensional, is empty, or holds a value that is not finite.

    Source: GRPO: DeepSeekMath (arXiv 2402.03300) section 4.1.2, outcome supervision; Dr. GRPO: arXiv 2503.20783
    section 3.2. Difference: neither paper states the degrees of freedom nor an eps; here the standard deviation is
    the population's.

    Example:
        >>> group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), normalize_std=False).tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards must have shape [G] with G >= 1, not {list(rewards.shape)}")
    if not np.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    if rewards.max() == rewards.min():
        return np.zeros(rewards.shape, dtype=np.float32)
    centered = rewards.astype(np.float64) - rewards.mean(dtype=np.float64)
    if normalize_std:
        centered /= centered.std() + eps
    advantages: npt.NDArray[np.float32] = centered.astype(np.float32)
    return advantages
