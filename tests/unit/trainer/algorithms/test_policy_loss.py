"""Every algorithm's loss and gradient against its formula, written naively in float64."""

import math

import numpy as np
import pytest
import torch

from services.trainer.algorithms.base import Clip, Normalization, divisor
from services.trainer.algorithms.loss import LossInputs, LossSettings, policy_loss
from services.trainer.algorithms.registry import ALGORITHMS
from services.trainer.algorithms.terms.correction import Correction, CorrectionLevel
from services.trainer.algorithms.terms.kl import KlEstimator
from services.trainer.algorithms.terms.ratios import MAX_LOG_RATIO
from tests.unit.trainer.algorithms.naive import naive_loss, random_samples

NAMES = list(ALGORITHMS)
CORRECTIONS = list(Correction)
NORMALIZATIONS = list(Normalization)


def settings_of(name, **changes):
    algorithm = ALGORITHMS[name]
    usual = {"clip": algorithm.clip, "normalization": algorithm.normalization, "max_new_tokens": 32}
    return LossSettings(**{**usual, "max_importance_weight": 1.3} | changes)


def torch_inputs(samples, *, dtype=torch.float64, **changes):
    def joined(key):
        return torch.tensor(np.concatenate([sample[key] for sample in samples] or [[]]), dtype=dtype)

    lengths = [len(sample["trainer"]) for sample in samples]
    return LossInputs(
        **{
            "trainer_logprobs": joined("trainer").requires_grad_(),
            "behavior_logprobs": joined("behavior"),
            "advantages": joined("advantages"),
            "segments": torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths, dtype=torch.int64)),
            "proximal_logprobs": joined("proximal"),
            "reference_logprobs": joined("reference"),
        }
        | changes
    )


def step_divisor(samples, settings):
    return divisor(settings.normalization, num_tokens=sum(len(s["trainer"]) for s in samples), num_samples=len(samples))


def whole_loss(name, samples, settings, **changes):
    """The loss of a step of one pack, and the inputs that got the gradient."""
    inputs = torch_inputs(samples, **changes)
    loss = policy_loss(inputs, algorithm=ALGORITHMS[name], settings=settings).loss / step_divisor(samples, settings)
    loss.backward()
    return loss.item(), inputs.trainer_logprobs.grad


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("level", list(CorrectionLevel))
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_printed_one(name, correction, level):
    settings = settings_of(name, correction=correction, correction_level=level)
    samples = random_samples()
    found, _ = whole_loss(name, samples, settings)
    assert found == pytest.approx(naive_loss(name, samples, settings), rel=1e-12)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_normalisation_and_kl_are_as_printed(normalization, estimator):
    settings = settings_of("grpo", normalization=normalization, kl_coefficient=0.05, kl_estimator=estimator)
    samples = random_samples(seed=3)
    found, _ = whole_loss("grpo", samples, settings)
    assert found == pytest.approx(naive_loss("grpo", samples, settings), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_slope_of_the_printed_loss(name):
    settings = settings_of(name, correction=Correction.TRUNCATED, clip=Clip(low=0.2, high=0.28))
    samples = random_samples(seed=1)
    for sample in samples:
        # CISPO's weight is a constant for the gradient, so it must not move with the trainer's log-probs.
        sample["anchored_ratios"] = np.exp(sample["trainer"] - sample["proximal"]).tolist()
    _, gradient = whole_loss(name, samples, settings)
    step, slopes = 1e-6, []
    for sample in samples:
        for t in range(len(sample["trainer"])):
            ends = []
            for sign in (1, -2):
                sample["trainer"][t] += sign * step
                ends.append(naive_loss(name, samples, settings))
            sample["trainer"][t] += step
            slopes.append((ends[0] - ends[1]) / (2 * step))
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-5, atol=1e-8)
    assert any(slopes)


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_close_to_the_reference(name):
    settings = settings_of(name, correction=Correction.TRUNCATED)
    samples = random_samples(lengths=(300, 20, 900, 120), seed=2)
    inputs = torch_inputs(samples, dtype=torch.float32)
    loss = policy_loss(inputs, algorithm=ALGORITHMS[name], settings=settings).loss / step_divisor(samples, settings)
    assert loss.item() == pytest.approx(naive_loss(name, samples, settings), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_packs_of_any_split_add_up_to_the_whole_batch(name, correction):
    settings = settings_of(name, correction=correction, correction_level=CorrectionLevel.SEQUENCE)
    samples = random_samples(lengths=(5, 9, 2, 6, 1), seed=4)
    _, whole = whole_loss(name, samples, settings)
    parts = []
    for part in (samples[:1], samples[1:4], samples[4:]):
        inputs = torch_inputs(part)
        policy_loss(inputs, algorithm=ALGORITHMS[name], settings=settings).loss.backward()
        parts.append(inputs.trainer_logprobs.grad / step_divisor(samples, settings))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_algorithm_is_the_plain_policy_gradient(name, correction):
    settings = settings_of(name, correction=correction, normalization=Normalization.SAMPLES)
    samples = random_samples(seed=7)
    for sample in samples:
        sample["trainer"] = sample["proximal"] = sample["behavior"]
    _, gradient = whole_loss(name, samples, settings, proximal_logprobs=None)
    expected = [-credit / len(s["trainer"]) / len(samples) for s in samples for credit in s["advantages"]]
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-10)


def test_without_proximal_log_probs_the_present_weights_are_the_proximal_ones():
    samples = random_samples(seed=6, spread=1.0)
    settings = settings_of("grpo", correction=Correction.TRUNCATED, normalization=Normalization.TOKENS)
    inputs = torch_inputs(samples, proximal_logprobs=None)
    outputs = policy_loss(inputs, algorithm=ALGORITHMS["grpo"], settings=settings)
    outputs.loss.backward()
    weights = np.exp(np.concatenate([sample["trainer"] - sample["behavior"] for sample in samples]))
    assert weights.max() > 1.3
    credits = np.concatenate([sample["advantages"] for sample in samples])
    np.testing.assert_allclose(inputs.trainer_logprobs.grad.numpy(), -np.minimum(weights, 1.3) * credits, rtol=1e-10)
    assert outputs.sums["clip_fraction"].item() == 0


def test_clipping_stops_the_gradient_on_the_side_that_would_gain():
    zeros = np.zeros(4)
    sample = {"trainer": np.log([1.5, 1.5, 0.5, 0.5]), "advantages": np.array([1.0, -1.0, 1.0, -1.0])}
    samples = [sample | {"behavior": zeros, "proximal": zeros, "reference": zeros}]
    settings = settings_of("dapo", clip=Clip(low=0.2, high=0.2))
    inputs = torch_inputs(samples)
    outputs = policy_loss(inputs, algorithm=ALGORITHMS["dapo"], settings=settings)
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert outputs.sums["clip_fraction"].item() == 2


def test_cispo_keeps_the_gradient_that_clipping_would_stop():
    zeros = np.zeros(1)
    samples = [{"trainer": np.log([3.0]), "advantages": np.ones(1)} | dict.fromkeys(("behavior", "proximal"), zeros)]
    samples[0]["reference"] = zeros
    _, kept = whole_loss("cispo", samples, settings_of("cispo"))
    _, stopped = whole_loss("dapo", samples, settings_of("dapo"))
    assert kept.tolist() == pytest.approx([-1.28])
    assert stopped.tolist() == [0.0]


def test_reported_values_are_what_their_names_say():
    samples = random_samples(seed=8)
    outputs = policy_loss(
        torch_inputs(samples), algorithm=ALGORITHMS["grpo"], settings=settings_of("grpo", kl_coefficient=0.1)
    )
    trainer = np.concatenate([sample["trainer"] for sample in samples])
    gap = trainer - np.concatenate([sample["behavior"] for sample in samples])
    ratio = np.exp(gap)
    assert outputs.sums["ratio"].item() == pytest.approx(ratio.sum())
    assert outputs.maxima["ratio_max"].item() == pytest.approx(ratio.max())
    assert outputs.sums["entropy"].item() == pytest.approx(-trainer.sum())
    assert outputs.sums["mismatch_kl"].item() == pytest.approx((ratio - 1 - gap).sum())
    assert not any(value.requires_grad for value in [*outputs.sums.values(), *outputs.maxima.values()])


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_that_are_far_apart_give_finite_losses_and_gradients(name, correction):
    far = {"trainer": np.array([-0.1, -500.0, -0.1, -500.0]), "behavior": np.array([-500.0, -0.1, -0.1, -500.0])}
    samples = [far | {"advantages": np.ones(4), "proximal": np.zeros(4), "reference": np.zeros(4)}]
    inputs = torch_inputs(samples, dtype=torch.float32, proximal_logprobs=None)
    settings = settings_of(name, correction=correction)
    outputs = policy_loss(inputs, algorithm=ALGORITHMS[name], settings=settings)
    outputs.loss.backward()
    assert math.isfinite(outputs.loss.item())
    assert torch.isfinite(inputs.trainer_logprobs.grad).all()
    assert outputs.maxima["ratio_max"].item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_give_a_zero_loss_without_maxima(name):
    outputs = policy_loss(torch_inputs([]), algorithm=ALGORITHMS[name], settings=settings_of(name))
    assert outputs.loss.item() == 0
    assert outputs.maxima == {}


def test_a_kl_term_without_reference_log_probs_is_refused():
    inputs = torch_inputs(random_samples(), reference_logprobs=None)
    with pytest.raises(ValueError, match="needs reference_logprobs"):
        policy_loss(inputs, algorithm=ALGORITHMS["grpo"], settings=settings_of("grpo", kl_coefficient=0.1))


@pytest.mark.parametrize("bad", [{"low": 1.1, "high": 0.2}, {"low": -0.1, "high": 0.2}, {"low": 0.2, "high": -0.1}])
def test_clip_ranges_without_meaning_are_refused(bad):
    with pytest.raises(ValueError, match="clip_low must"):
        Clip(**bad)
