"""Survival of completion lengths, estimated from finished and running completions. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def survival(finished: npt.NDArray[np.int64], running: npt.NDArray[np.int64], num_bins: int) -> npt.NDArray[np.float64]:
    """Share of completions that outlive each bin.

    Leaving out running completions would bias the estimate to short ones as long as only short ones have finished. Past
    the longest finished one the share stays constant: only the limit is known there, which the caller applies.

    Args:
        finished: Bins in which completions ended, [n], in [0, num_bins).
        running: Bins that completions have reached and not ended in, [m], in [0, num_bins).
        num_bins: Bins in all.

    Returns:
        S[b] = P(a completion outlives bin b), [num_bins], not increasing; positive at every running one's bin.

    Source: Kaplan and Meier 1958, the product-limit estimator; running completions are the censored ones.
    """
    num_ended = np.bincount(finished, minlength=num_bins).astype(np.float64)
    num_reached = num_ended + np.bincount(running, minlength=num_bins)
    num_at_risk = num_reached[::-1].cumsum()[::-1]
    # A running one is at risk up to and in the bin it has reached, so the factor there never falls to zero.
    ended_share = np.divide(num_ended, num_at_risk, out=np.zeros(num_bins), where=num_at_risk > 0)
    return np.cumprod(1.0 - ended_share)
