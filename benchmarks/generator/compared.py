"""Compares a rule with a sweep of fixed settings: with the best of all, and the best that preempts little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CALM_SHARE = 0.02
"""Preemptions per sample up to which a fixed setting counts as calm."""


def compared(rule: Mapping[str, float], swept: Mapping[int, Mapping[str, float]], *, rate: str) -> dict[str, Any]:
    """The common result of both tables of concurrency.

    Args:
        rule: The rule's numbers: `rate`, `preempted_share` and `mean_samples`.
        swept: The same for each fixed number of concurrent samples.
        rate: The number to maximise.
    """
    best = max(swept, key=lambda number: swept[number][rate])
    calm = [number for number in swept if swept[number]["preempted_share"] <= CALM_SHARE]
    best_calm = max(calm, key=lambda number: swept[number][rate], default=None)
    against_calm = (
        {}
        if best_calm is None
        else {"best_calm_fixed": best_calm, "ratio_to_best_calm_fixed": rule[rate] / swept[best_calm][rate]}
    )
    return {
        "ratio_to_best_fixed": rule[rate] / swept[best][rate],
        "preempted_share": rule["preempted_share"],
        "mean_samples": rule["mean_samples"],
        "best_fixed": best,
        "best_fixed_preempted_share": swept[best]["preempted_share"],
        **against_calm,
        "rule": dict(rule),
        "swept": {number: dict(outcome) for number, outcome in swept.items()},
    }
