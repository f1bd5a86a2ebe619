"""Loss masks as the lengths of their runs: of ones first (perhaps none), then of zeros, and so on. Pure.

A mask has at most one more run than tokens, and a session two a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from penstock.errors import InvalidFieldError


def mask_runs(mask: bytes) -> list[int]:
    """The runs of a mask, uint8[n]; none of an empty one."""
    if not mask:
        return []
    values = np.frombuffer(mask, np.uint8)
    ends = [*(np.flatnonzero(np.diff(values)) + 1).tolist(), values.size]
    lengths = np.diff([0, *ends]).tolist()
    return lengths if values[0] else [0, *lengths]


def mask_of(runs: Sequence[int]) -> bytes:
    """The mask of those runs, uint8[n]."""
    return b"".join([(b"\0" if position % 2 else b"\1") * length for position, length in enumerate(runs)])


def run_spans(runs: Sequence[int], *, num_tokens: int, field: str) -> list[tuple[int, int, bool]]:
    """Begin, end and whether it is of ones, for each run that is not empty.

    Raises InvalidFieldError, naming `field`: they are not the runs of a mask of `num_tokens` tokens.
    """
    if sum(runs) != num_tokens or any(length < (at > 0) for at, length in enumerate(runs)):
        raise InvalidFieldError(
            f"{field}: {len(runs)} runs of {sum(runs)} tokens, must be of {num_tokens}, none but the first empty",
            field=field,
        )
    bounds = pairwise(accumulate(runs, initial=0))
    return [(begin, end, not at % 2) for at, (begin, end) in enumerate(bounds) if end > begin]
