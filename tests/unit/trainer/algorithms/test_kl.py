"""KL estimators against the divergence of two known policies."""

import pytest
import torch

from services.trainer.algorithms.terms.kl import KlEstimator, estimated_kl


def policies():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 12, dtype=torch.float64, generator=generator)
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_the_unbiased_ones_average_to_the_kl(estimator):
    p, q = policies()
    expectation = (p * estimated_kl(p.log(), q.log(), estimator)).sum()
    assert expectation.item() == pytest.approx((p * (p.log() - q.log())).sum().item(), rel=1e-9)


@pytest.mark.parametrize("estimator", [KlEstimator.K2, KlEstimator.K3])
def test_the_others_are_never_negative(estimator):
    p, q = policies()
    assert (estimated_kl(p.log(), q.log(), estimator) >= 0).all()


def test_k2s_gradient_is_that_of_the_kl():
    p, q = policies()
    logits = p.log().clone().requires_grad_()
    policy = torch.softmax(logits, -1)
    (policy * (policy.log() - q.log())).sum().backward()
    expected = logits.grad.clone()
    logits.grad = None
    logprobs = torch.log_softmax(logits, -1)
    (p * estimated_kl(logprobs, q.log(), KlEstimator.K2)).sum().backward()
    torch.testing.assert_close(logits.grad, expected)
