"""Weights of tokens that other weights sampled, number by number."""

import math

import pytest
import torch

from services.trainer.algorithms.terms.correction import Correction, CorrectionLevel, importance_weights

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)


def weights_of(ratios, *, correction, max_weight, level=CorrectionLevel.TOKEN, segments=None):
    logprobs = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)
    weights = importance_weights(
        logprobs - 1.0,
        torch.full_like(logprobs, -1.0),
        torch.arange(len(ratios)) if segments is None else torch.tensor(segments),
        correction=correction,
        level=level,
        max_weight=max_weight,
    )
    assert not weights.requires_grad
    return weights.tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction.NONE, [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Correction.DECOUPLED, [0.25, 0.5, 1.0, 2.0, 4.0]),
        (Correction.TRUNCATED, [0.25, 0.5, 1.0, 2.0, 3.0]),
        (Correction.MASKED, [0.0, 0.5, 1.0, 2.0, 0.0]),
    ],
)
def test_what_becomes_of_ratios_inside_and_outside_the_bound(correction, expected):
    assert weights_of(RATIOS, correction=correction, max_weight=3.0) == pytest.approx(expected)


def test_a_ratio_at_the_bound_or_at_its_inverse_is_inside():
    assert weights_of([0.5, 1.0, 2.0], correction=Correction.MASKED, max_weight=1.0) == [0.0, 1.0, 0.0]


def test_a_completion_has_the_product_of_its_tokens_ratios():
    weights = weights_of(
        [2.0, 0.5, 4.0, 3.0],
        correction=Correction.DECOUPLED,
        max_weight=9.0,
        level=CorrectionLevel.SEQUENCE,
        segments=[0, 1, 0, 1],
    )
    assert weights == pytest.approx([8.0, 1.5, 8.0, 1.5])
