"""Decides when a plan in force is replaced. Pure: rates and times are passed in.

StreamRL (Zhong et al. 2025), section 4.3, adds a unit when generation lags behind training by the time that one more
unit would save. Here any other plan counts by its total gain, with three brakes that the paper does not have: a minimum
gain, so that noise changes nothing; a cool-down; and the cost of the change must be recovered.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_GAIN = 0.05
"""Least gain of throughput."""
MAX_LOSS = 0.01
"""Largest loss of throughput at which unneeded machines are given up."""
COOL_DOWN_INTERVALS = 12
"""Reports of its machines for which a plan stays in force, at least: 60 s at one report every 5 s."""
HORIZON_S = 1800.0
"""A revision must pay for itself within this time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to revise, and why, in words."""

    is_revised: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A plan against the one in force, both scored over the machines present now."""

    rate: float
    """Samples per second of the new plan."""
    kept_rate: float
    """Samples per second of the plan in force; 0 if it can no longer run."""
    num_gpus: int
    """GPUs of the new plan."""
    num_kept_gpus: int
    migration_s: float
    """How long generators that change are idle: they start and load weights."""
    moved_share: float
    """Share of the generators that change."""
    is_pool_moved: bool = False
    """Whether the trainer moves; `migration_s` is then how long nothing is trained."""
    is_critic_moved: bool = False
    """Whether a critic of its own moves; likewise."""


def judge(offer: Offer, *, rested_s: float, cool_down_s: float) -> Verdict:
    """Whether the new plan replaces the old one.

    Args:
        offer: Both plans.
        rested_s: How long the plan has been in force.
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


def worth(offer: Offer) -> float:
    """Samples that are trained within the horizon if the plan replaces the one in force now."""
    goes_on = (1 - offer.moved_share) * offer.kept_rate
    return offer.migration_s * goes_on + (HORIZON_S - offer.migration_s) * offer.rate


def cost_of(offer: Offer) -> str:
    """The cost of the change, in words."""
    if offer.is_pool_moved or offer.is_critic_moved:
        who = {"the trainer": offer.is_pool_moved, "the critic": offer.is_critic_moved}
        moved = " and ".join(name for name, is_moved in who.items() if is_moved)
        return f"the change moves {moved}, which stops everything for {offer.migration_s:.0f} s"
    return f"the change stops {offer.moved_share:.0%} of the generators for {offer.migration_s:.0f} s"


def _earned(offer: Offer, gain: float) -> Verdict:
    """Whether a faster plan makes up for the time that putting it in force takes."""
    lost = offer.migration_s * offer.moved_share * offer.kept_rate
    won = (offer.rate - offer.kept_rate) * (HORIZON_S - offer.migration_s)
    cost = cost_of(offer)
    if won <= lost:
        return Verdict(False, f"{gain:.0%} faster, but {cost}, which does not pay within {HORIZON_S:.0f} s")
    return Verdict(True, f"{gain:.0%} faster; {cost}")
