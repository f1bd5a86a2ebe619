"""The printed formulas, one sample and one token after the other, in Python floats.

A sample is a dict of equally long lists: trainer, behavior, proximal, reference (log-probs) and advantages.
"""

from __future__ import annotations

import math

import numpy as np

from services.trainer.algorithms.base import Normalization
from services.trainer.algorithms.loss import LossSettings
from services.trainer.algorithms.terms.correction import Correction, CorrectionLevel
from services.trainer.algorithms.terms.kl import KlEstimator


def random_samples(lengths=(7, 1, 12, 4), *, seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        behavior = -rng.exponential(1.5, length)
        sample = {name: behavior + rng.normal(0, spread, length) for name in ("trainer", "proximal", "reference")}
        # One credit a sample, as groups give it.
        samples.append(sample | {"behavior": behavior, "advantages": np.full(length, rng.normal())})
    return samples


def clipped_token(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def token_losses(name, sample, anchor, settings):
    """The surrogate of every token of a sample."""
    low, high = settings.clip.low, settings.clip.high
    gaps = [sample["trainer"][t] - anchor[t] for t in range(len(anchor))]
    credits = sample["advantages"]
    if name == "gspo":
        ratio = math.exp(sum(gaps) / len(gaps))
        return [clipped_token(ratio, credits[t], low, high) for t in range(len(gaps))]
    if name == "cispo":
        constants = sample.get("anchored_ratios") or [math.exp(gap) for gap in gaps]
        bounded = [min(max(ratio, 1 - low), 1 + high) for ratio in constants]
        return [-bounded[t] * credits[t] * sample["trainer"][t] for t in range(len(gaps))]
    if name == "tba":
        return [-sample["trainer"][t] * credits[t] for t in range(len(gaps))]
    if name == "rloo":
        return [-math.exp(gaps[t]) * credits[t] for t in range(len(gaps))]
    return [clipped_token(math.exp(gaps[t]), credits[t], low, high) for t in range(len(gaps))]


def token_weights(sample, settings):
    gaps = [p - b for p, b in zip(sample["proximal"], sample["behavior"], strict=True)]
    if settings.correction is Correction.NONE:
        return [1.0] * len(gaps)
    if settings.correction_level is CorrectionLevel.SEQUENCE:
        gaps = [sum(gaps)] * len(gaps)
    weights = [math.exp(gap) for gap in gaps]
    bound = settings.max_importance_weight
    if settings.correction is Correction.TRUNCATED:
        return [min(weight, bound) for weight in weights]
    if settings.correction is Correction.MASKED:
        return [weight if 1 / bound <= weight <= bound else 0.0 for weight in weights]
    return weights


def token_kl(trainer, reference, estimator):
    gap = reference - trainer
    if estimator is KlEstimator.K1:
        return -gap
    return gap * gap / 2 if estimator is KlEstimator.K2 else math.exp(gap) - gap - 1


def naive_loss(name, samples, settings: LossSettings):
    """What the gradient of a step over these samples comes from, divided by everything."""
    total = 0.0
    num_tokens = sum(len(sample["trainer"]) for sample in samples)
    for sample in samples:
        anchor = sample["behavior"] if settings.correction is Correction.NONE else sample["proximal"]
        losses = token_losses(name, sample, anchor, settings)
        weights = token_weights(sample, settings)
        part = 0.0
        for t in range(len(losses)):
            part += weights[t] * losses[t]
            if settings.kl_coefficient:
                kl = token_kl(sample["trainer"][t], sample["reference"][t], settings.kl_estimator)
                part += settings.kl_coefficient * kl
        if settings.normalization is Normalization.TOKENS:
            total += part / num_tokens
        elif settings.normalization is Normalization.SAMPLES:
            total += part / len(losses) / len(samples)
        elif settings.normalization is Normalization.SEQUENCES:
            total += part / len(samples)
        else:
            total += part / settings.max_new_tokens / len(samples)
    return total
