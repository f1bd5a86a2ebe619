"""Emulated engines whose steps are a straight line and whose lengths are log-normal."""

from __future__ import annotations

from typing import Any

from penstock.batching.step_times import LinearSteps
from services.generator.emulation.length_law import LogNormalLengths
from services.generator.engines.emulated.emulated_engine import EmulatedSpec


def emulated_spec(
    *,
    token_s: float = 1 / 2000,
    base_step_s: float = 0.0,
    mean_tokens: float = 45.0,
    length_sigma: float = 0.8,
    **rest: Any,
) -> EmulatedSpec:
    """A decoding step of n samples takes base_step_s + n * token_s."""
    steps = LinearSteps(base_s=base_step_s, per_sample_s=token_s)
    return EmulatedSpec(steps=steps, lengths=LogNormalLengths(mean_tokens=mean_tokens, sigma=length_sigma), **rest)
