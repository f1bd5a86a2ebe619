"""The staleness policies by their number on the wire."""

from __future__ import annotations

from typing import Literal

from penstock.staleness.continue_ import Continue
from penstock.staleness.drop import Drop
from penstock.staleness.policy import StalenessPolicy
from penstock.staleness.wait import Wait

DEFAULT = Wait()
POLICIES: dict[int, StalenessPolicy] = {each.number: each for each in (DEFAULT, Drop(), Continue())}
PolicyName = Literal["wait", "drop", "continue"]
"""What a configuration may say; the names above."""
