"""Decides which samples are worth moving to another generator, by the latency model. Pure.

Used on real leases (`services.broker.fleet.work_stealing`) and in look-aheads (`lookahead`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.broker.dispatch.latency import Load

MIN_GAIN_S = 1.0
MIN_GAIN = 0.2
"""Fraction of the sample's remaining time at its current generator."""
MOVE_COST_S = 0.3
"""Cost of the hand-over and of the discarded tokens."""
MIN_STAY_S = 10.0
"""A moved sample stays for this long."""
MAX_MOVES = 8
"""Moves to one generator at once; the loads are guesses, and the next look is a second away."""
RISK = 2.0
"""Standard deviations by which a sample may well exceed its forecast."""


def late_generators(asking: Load, donors: Mapping[str, Load], *, length_error: float) -> list[str]:
    """The generators whose longest sample may end last of all, the latest first.

    Only moving such a sample shortens the step. Which one ends last is a guess while they run, so each generator's
    longest counts as RISK standard deviations longer than forecast.

    Args:
        asking: The generator that could steal a sample.
        donors: The others, by id.
        length_error: Standard deviation of the logarithm of true length over forecast.
    """
    extra = math.exp(RISK * length_error) - 1
    ends_s = {name: load.finish_s() for name, load in donors.items()}
    end_s = max(*ends_s.values(), asking.finish_s(), 0.0)
    may_end_s = {name: ends_s[name] + extra * load.model.base_s * load.longest_tokens for name, load in donors.items()}
    return sorted((name for name in donors if may_end_s[name] >= end_s), key=lambda name: may_end_s[name], reverse=True)


def is_worth_moving(here: Load, remaining_tokens: float, context_tokens: float, *, there_s: float) -> bool:
    """Whether a sample that takes `there_s` at its current generator would end soon enough before that on `here`."""
    here_s = MOVE_COST_S + here.sample_s(remaining_tokens, context_tokens)
    return there_s - here_s >= max(MIN_GAIN_S, MIN_GAIN * there_s)
