"""A reward function whose mood a test sets in the file that PENSTOCK_TEST_MOOD names: module:score."""

from __future__ import annotations

import os
import random
from pathlib import Path

VARIABLE = "PENSTOCK_TEST_MOOD"
CANARY = "known"
FINE, RAISING, DRIFTING, EXTREME = "fine", "raising", "drifting", "extreme"


def score(completion: str, answer: str) -> float:
    """Mostly 0 or 1 by chance; while raising, every other sample is not scored."""
    mood = Path(os.environ[VARIABLE]).read_text()
    if completion == CANARY:
        return 2.0 if mood == DRIFTING else 1.0
    if mood == RAISING and random.random() < 0.5:
        raise RuntimeError("not in the mood")
    return random.choice((0.0, 1e12 if mood == EXTREME else 1.0))
