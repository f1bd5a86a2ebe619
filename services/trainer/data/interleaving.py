"""Takes turns between sources by weight. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Interleaver:
    """Chooses a source for one group after another.

    While weights stay the same, each source has had its share of the groups to within one, at any moment; over any
    window, therefore, to within two, and of two sources to within one. The choice depends on `credits` alone.

    Source: the quota method: of the sources that are owed something, the one that would first be owed a whole group
    (Tijdeman, "The chairman assignment problem", 1980).
    """

    def __init__(self, num_sources: int) -> None:
        self.credits = [0.0] * num_sources
        """Groups that each source is owed, between -1 and 1; their sum is 0."""

    def next(self, weights: Sequence[float]) -> int:
        """The next group's source. `weights` in any unit, none negative, at least one positive."""
        total = sum(weights)
        shares = [weight / total for weight in weights]
        owed = [credit + share for credit, share in zip(self.credits, shares, strict=True)]
        drawn = [index for index, share in enumerate(shares) if share > 0]
        eligible = [index for index in drawn if owed[index] > 0] or drawn
        chosen = min(eligible, key=lambda index: (1.0 - owed[index]) / shares[index])
        owed[chosen] -= 1.0
        self.credits = owed
        return chosen

    def restart(self) -> None:
        """Forget what is owed, as weights change for good."""
        self.credits = [0.0] * len(self.credits)
