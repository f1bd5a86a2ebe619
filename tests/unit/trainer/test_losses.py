"""The policy loss against a naive reference that loops over tokens in float64."""

import math

import numpy as np
import pytest
import torch

from services.trainer.losses import (
    MAX_LOG_RATIO,
    Correction,
    PolicyLossInputs,
    PolicyLossSettings,
    k3_kl,
    policy_loss,
)

CORRECTIONS = list(Correction)


def naive_loss(trainer, behavior, advantages, *, settings, proximal=None, reference=None):
    """One token after the other, as the formula is printed; `proximal` is a constant, as in the paper."""
    total = 0.0
    for t in range(len(trainer)):
        if settings.correction is Correction.NONE:
            ratio, weight = math.exp(trainer[t] - behavior[t]), 1.0
        else:
            ratio, weight = math.exp(trainer[t] - proximal[t]), math.exp(proximal[t] - behavior[t])
            if settings.correction is Correction.TRUNCATED:
                weight = min(weight, settings.max_importance_weight)
        clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        total -= weight * min(ratio * advantages[t], clipped * advantages[t])
        if settings.kl_beta:
            gap = reference[t] - trainer[t]
            total += settings.kl_beta * (math.exp(gap) - gap - 1)
    return total


def random_case(num_tokens=200, seed=0, spread=0.5):
    rng = np.random.default_rng(seed)
    behavior = -rng.exponential(1.5, num_tokens)
    return {
        "trainer": behavior + rng.normal(0, spread, num_tokens),
        "behavior": behavior,
        "proximal": behavior + rng.normal(0, spread, num_tokens),
        "reference": behavior + rng.normal(0, spread, num_tokens),
        "advantages": rng.normal(0, 1, num_tokens),
    }


def torch_inputs(case, *, dtype=torch.float64, **changes):
    tensors = {name: torch.tensor(values, dtype=dtype) for name, values in case.items()}
    tensors |= changes
    return PolicyLossInputs(
        trainer_logprobs=tensors["trainer"].requires_grad_(),
        behavior_logprobs=tensors["behavior"],
        advantages=tensors["advantages"],
        segments=torch.zeros(len(case["trainer"]), dtype=torch.int64),
        proximal_logprobs=tensors["proximal"],
        reference_logprobs=tensors["reference"],
    )


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kl_beta", [0.0, 0.05])
def test_loss_equals_the_naive_reference(correction, kl_beta):
    settings = PolicyLossSettings(
        correction=correction, kl_beta=kl_beta, clip_low=0.2, clip_high=0.28, max_importance_weight=1.5
    )
    case = random_case()
    outputs = policy_loss(torch_inputs(case), settings=settings)
    expected = naive_loss(
        case["trainer"],
        case["behavior"],
        case["advantages"],
        settings=settings,
        proximal=case["proximal"],
        reference=case["reference"],
    )
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-12)
    assert outputs.sums["loss"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_gradient_equals_the_slope_of_the_naive_reference(correction):
    settings = PolicyLossSettings(correction=correction, kl_beta=0.1, max_importance_weight=1.5)
    case = random_case(num_tokens=60, seed=1)
    inputs = torch_inputs(case)
    policy_loss(inputs, settings=settings).loss.backward()
    step = 1e-6
    for t in range(60):
        ends = []
        for sign in (1, -1):
            moved = case["trainer"].copy()
            moved[t] += sign * step
            ends.append(
                naive_loss(
                    moved,
                    case["behavior"],
                    case["advantages"],
                    settings=settings,
                    proximal=case["proximal"],
                    reference=case["reference"],
                )
            )
        slope = (ends[0] - ends[1]) / (2 * step)
        assert inputs.trainer_logprobs.grad[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_float32_loss_stays_close_to_the_float64_reference():
    case = random_case(num_tokens=2000, seed=2)
    settings = PolicyLossSettings(correction=Correction.TRUNCATED)
    expected = naive_loss(
        case["trainer"], case["behavior"], case["advantages"], settings=settings, proximal=case["proximal"]
    )
    outputs = policy_loss(torch_inputs(case, dtype=torch.float32), settings=settings)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_packs_add_up_to_the_gradient_of_the_whole_batch(correction):
    settings = PolicyLossSettings(correction=correction)
    case = random_case(num_tokens=90, seed=4)
    whole = torch_inputs(case)
    policy_loss(whole, settings=settings).loss.backward()
    parts = []
    for part in (slice(0, 10), slice(10, 70), slice(70, 90)):
        inputs = torch_inputs({name: values[part] for name, values in case.items()})
        policy_loss(inputs, settings=settings).loss.backward()
        parts.append(inputs.trainer_logprobs.grad)
    torch.testing.assert_close(torch.cat(parts), whole.trainer_logprobs.grad, rtol=0, atol=0)


def test_decoupled_equals_plain_ppo_when_proximal_is_behaviour():
    case = random_case(seed=5)
    case["proximal"] = case["behavior"]
    losses = [
        policy_loss(torch_inputs(case), settings=PolicyLossSettings(correction=correction)).loss.item()
        for correction in CORRECTIONS
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize("correction", [Correction.TRUNCATED, Correction.DECOUPLED])
def test_gradient_at_the_proximal_policy_is_the_importance_weighted_policy_gradient(correction):
    case = random_case(seed=6, spread=1.0)
    inputs = torch_inputs(case)
    without = PolicyLossInputs(
        trainer_logprobs=inputs.trainer_logprobs,
        behavior_logprobs=inputs.behavior_logprobs,
        advantages=inputs.advantages,
        segments=inputs.segments,
    )
    outputs = policy_loss(without, settings=PolicyLossSettings(correction=correction, max_importance_weight=2.0))
    outputs.loss.backward()
    weight = np.exp(case["trainer"] - case["behavior"])
    if correction is Correction.TRUNCATED:
        assert weight.max() > 2.0
        weight = np.minimum(weight, 2.0)
    np.testing.assert_allclose(inputs.trainer_logprobs.grad.numpy(), -weight * case["advantages"], rtol=1e-10)
    assert outputs.sums["clip_fraction"].item() == 0


def test_on_policy_gradient_is_the_plain_policy_gradient_for_every_correction():
    case = random_case(seed=7)
    case["trainer"] = case["behavior"]
    for correction in CORRECTIONS:
        inputs = torch_inputs(case, proximal=None)
        policy_loss(inputs, settings=PolicyLossSettings(correction=correction)).loss.backward()
        np.testing.assert_allclose(inputs.trainer_logprobs.grad.numpy(), -case["advantages"], rtol=1e-12)


def test_clipping_stops_the_gradient_on_the_side_that_would_gain():
    ratios = [1.5, 1.5, 0.5, 0.5]
    case = {
        "trainer": np.log(ratios),
        "behavior": np.zeros(4),
        "proximal": np.zeros(4),
        "reference": np.zeros(4),
        "advantages": np.array([1.0, -1.0, 1.0, -1.0]),
    }
    inputs = torch_inputs(case)
    outputs = policy_loss(inputs, settings=PolicyLossSettings(clip_low=0.2, clip_high=0.2))
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert outputs.sums["clip_fraction"].item() == 2


def test_reported_values_are_what_their_names_say():
    case = random_case(seed=8)
    outputs = policy_loss(torch_inputs(case), settings=PolicyLossSettings(kl_beta=0.1))
    gap = case["trainer"] - case["behavior"]
    ratio = np.exp(gap)
    assert outputs.sums["ratio"].item() == pytest.approx(ratio.sum())
    assert outputs.maxima["ratio_max"].item() == pytest.approx(ratio.max())
    assert outputs.sums["entropy"].item() == pytest.approx(-case["trainer"].sum())
    assert outputs.sums["mismatch_kl"].item() == pytest.approx((ratio - 1 - gap).sum())
    assert not any(value.requires_grad for value in [*outputs.sums.values(), *outputs.maxima.values()])


def test_k3_estimates_the_kl_of_two_categorical_policies():
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(12, dtype=torch.float64, generator=generator), 0)
    q = torch.softmax(torch.randn(12, dtype=torch.float64, generator=generator), 0)
    expectation = (p * k3_kl(p.log(), q.log())).sum()
    assert expectation.item() == pytest.approx((p * (p.log() - q.log())).sum().item(), rel=1e-9)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_log_probs_that_are_far_apart_give_finite_losses_and_gradients(correction):
    case = random_case(num_tokens=4)
    case["trainer"] = np.array([-0.1, -500.0, -0.1, -500.0])
    case["behavior"] = np.array([-500.0, -0.1, -0.1, -500.0])
    inputs = torch_inputs(case, dtype=torch.float32, proximal=None)
    outputs = policy_loss(inputs, settings=PolicyLossSettings(correction=correction))
    outputs.loss.backward()
    assert math.isfinite(outputs.loss.item())
    assert torch.isfinite(inputs.trainer_logprobs.grad).all()
    assert outputs.maxima["ratio_max"].item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)


def test_no_tokens_give_a_zero_loss_without_maxima():
    outputs = policy_loss(torch_inputs(random_case(num_tokens=0)), settings=PolicyLossSettings())
    assert outputs.loss.item() == 0
    assert outputs.maxima == {}


def test_a_kl_term_without_reference_logprobs_is_refused():
    inputs = torch_inputs(random_case(num_tokens=3), reference=None)
    with pytest.raises(ValueError, match="needs reference_logprobs"):
        policy_loss(inputs, settings=PolicyLossSettings(kl_beta=0.1))


@pytest.mark.parametrize(
    "bad",
    [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}, {"kl_beta": -1.0}, {"max_importance_weight": 0.0}],
)
def test_settings_without_meaning_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        PolicyLossSettings(**bad)
