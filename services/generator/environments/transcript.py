"""Splits a sample's accepted tokens into the turns of its session. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.errors import InvalidFieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """What was sampled in one turn, and what the environment's answer gave, as far as either was stored."""

    sampled: tuple[int, ...]
    given: tuple[int, ...]
    """Empty if nothing of an answer was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A session so far."""

    opening: tuple[int, ...]
    """Given before the first turn, mostly nothing."""
    turns: tuple[RecordedTurn, ...]


def read_transcript(token_ids: Sequence[int], loss_mask: bytes) -> Transcript:
    """The turns of an accepted prefix: a turn is a run of sampled tokens and the given ones that follow.

    Raises InvalidFieldError if the mask has not one byte a token; an empty one stands for sampled tokens alone.
    """
    mask = np.frombuffer(loss_mask, np.uint8) if loss_mask else np.ones(len(token_ids), np.uint8)
    if mask.size != len(token_ids):
        raise InvalidFieldError(
            f"prefix_loss_mask: {mask.size} bytes; must be {len(token_ids)}, one a token", field="prefix_loss_mask"
        )
    ends = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), mask.size]
    runs = [tuple(token_ids[start:end]) for start, end in pairwise(ends) if end > start]
    opening = runs.pop(0) if runs and not mask[0] else ()
    turns = [
        RecordedTurn(sampled=runs[at], given=runs[at + 1] if at + 1 < len(runs) else ())
        for at in range(0, len(runs), 2)
    ]
    return Transcript(opening=opening, turns=tuple(turns))
