"""When a plan in force gives way to another. Pure: it is handed rates and times.

StreamRL (Zhong et al. 2025), section 4.3, adds a unit when what generation lags behind training is what one more unit
would save. Here any other plan counts by what it gains in all, with three brakes the paper does not have: a smallest
gain, so that noise changes nothing; a time of rest; and the change itself must be earned back.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_GAIN = 0.05
"""Of throughput."""
MAX_LOSS = 0.01
"""Of throughput, at which machines that are not needed are given up."""
COOL_DOWN_INTERVALS = 12
"""Reports of its machines that a plan is in force for, at least: 60 s where they report every 5 s."""
HORIZON_S = 1800.0
"""A revision must pay for itself in this time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to revise, and why in words."""

    is_revised: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A plan against the one in force, both scored over the machines that are there now."""

    rate: float
    """Samples per second of the new one."""
    kept_rate: float
    """Of the one in force; 0 when it cannot run any more."""
    num_gpus: int
    """Of the new one."""
    num_kept_gpus: int
    migration_s: float
    """How long generators that change do nothing: they start and load weights."""
    moved_share: float
    """Part of the generators that changes."""


def judge(offer: Offer, *, rested_s: float, cool_down_s: float) -> Verdict:
    """Whether the new plan takes over.

    Args:
        offer: Both plans.
        rested_s: How long the plan in force has been.
        cool_down_s: How long it must have been.
    """
    if offer.rate <= 0:
        return Verdict(False, "no plan can run on the machines that are there")
    if offer.kept_rate <= 0:
        return Verdict(True, "the plan in force cannot run any more")
    if rested_s < cool_down_s:
        return Verdict(False, f"the plan in force is {rested_s:.0f} s old, at least {cool_down_s:.0f} s are waited")
    gain = offer.rate / offer.kept_rate - 1
    if gain >= MIN_GAIN:
        return _earned(offer, gain)
    num_fewer = offer.num_kept_gpus - offer.num_gpus
    if gain >= -MAX_LOSS and num_fewer > 0:
        return Verdict(True, f"{num_fewer} GPUs fewer are as fast")
    return Verdict(False, f"{gain:.1%} faster, less than {MIN_GAIN:.0%}")


def cost_of(offer: Offer) -> str:
    """What the change costs, in words."""
    return f"the change stops {offer.moved_share:.0%} of the generators for {offer.migration_s:.0f} s"


def _earned(offer: Offer, gain: float) -> Verdict:
    """Whether a faster plan makes up for the time in which it is put in place."""
    lost = offer.migration_s * offer.moved_share * offer.kept_rate
    won = (offer.rate - offer.kept_rate) * (HORIZON_S - offer.migration_s)
    cost = cost_of(offer)
    if won <= lost:
        return Verdict(False, f"{gain:.0%} faster, but {cost}, which does not pay within {HORIZON_S:.0f} s")
    return Verdict(True, f"{gain:.0%} faster; {cost}")
