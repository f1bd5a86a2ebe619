"""Trajectory balance as it is computed here against its objective as printed, differentiated by PyTorch."""

import numpy as np
import pytest
import torch

from services.trainer.algorithms.base import Clip, divisor
from services.trainer.algorithms.loss import LossInputs, LossSettings, policy_loss
from services.trainer.algorithms.tba import TBA

BETA = 0.05


def printed_objective(logprobs, references, rewards):
    """The mean over K samples of (log Z + log pi - log pi_ref - r / beta)^2, log Z without gradient."""
    totals = torch.stack([tokens.sum() for tokens in logprobs])
    reference_totals = torch.stack([tokens.sum() for tokens in references])
    log_z = (reference_totals - totals + rewards / BETA).mean().detach()
    return ((log_z + totals - reference_totals - rewards / BETA) ** 2).mean()


def test_the_gradient_is_that_of_the_printed_objective_but_for_its_scale():
    rng = np.random.default_rng(4)
    lengths = [3, 9, 1, 6]
    logprobs = [torch.tensor(-rng.exponential(1.0, n), requires_grad=True) for n in lengths]
    references = [torch.tensor(-rng.exponential(1.0, n)) for n in lengths]
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    printed_objective(logprobs, references, rewards).backward()
    expected = torch.cat([tokens.grad for tokens in logprobs]) * BETA / 2

    gaps = [float((own - other).sum().detach()) for own, other in zip(logprobs, references, strict=True)]
    credits = TBA.group_advantages(rewards.numpy() - BETA * np.array(gaps))
    joined = torch.cat([tokens.detach() for tokens in logprobs]).requires_grad_()
    counts = torch.tensor(lengths)
    inputs = LossInputs(
        trainer_logprobs=joined,
        # Of another policy altogether: trajectory balance does not look at it.
        behavior_logprobs=joined.detach() - 3.0,
        advantages=torch.repeat_interleave(torch.tensor(credits, dtype=torch.float64), counts),
        segments=torch.repeat_interleave(torch.arange(4), counts),
    )
    settings = LossSettings(clip=Clip(low=1.0, high=0.0), normalization=TBA.normalization)
    loss = policy_loss(inputs, algorithm=TBA, settings=settings).loss
    (loss / divisor(TBA.normalization, num_tokens=sum(lengths), num_samples=4)).backward()
    torch.testing.assert_close(joined.grad, expected, rtol=1e-6, atol=1e-6)


def test_the_objective_is_least_where_the_policy_is_the_reference_tilted_by_the_reward():
    rng = np.random.default_rng(5)
    references, rewards = -rng.exponential(5.0, 4), np.array([1.0, 0.0, 0.25, 0.5])
    # log pi = log pi_ref + r / beta - log Z for any Z: nobody gets any credit.
    policy = references + rewards / BETA - 7.0
    credits = TBA.group_advantages(rewards - BETA * (policy - references))
    assert credits == pytest.approx(np.zeros(4), abs=1e-6)
