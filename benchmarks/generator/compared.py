"""A rule against a sweep of fixed settings: against the best of all, and against the best that preempts little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CALM_SHARE = 0.02
"""Preemptions over samples up to which a fixed setting counts as calm."""


def compared(rule: Mapping[str, float], swept: Mapping[int, Mapping[str, float]], *, rate: str) -> dict[str, Any]:
    """What both tables of concurrency report.

    Args:
        rule: Its numbers: `rate`, `preempted_share` and `mean_samples`.
        swept: The same of each fixed number of samples at once.
        rate: Which number is to be high.
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
