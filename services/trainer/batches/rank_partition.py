"""Distributes trajectories over processes that train together: in rounds of one pack for each.

In a round every process makes one pass, and waits for the slowest. So the packs of a round have tokens in proportion to
the processes' shares, and the longest trajectories go to the strongest process.

Invariants:
- Every trajectory lies whole in exactly one pack of one round.
- Packs of the strongest process hold at most `max_pack_tokens`, those of another proportionally less; a longer
  trajectory is alone in a pack of the strongest.
- The same trajectories in the same order give the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.trainer.batches.packing import Pack, Trajectory, join, pack_trajectories


def partition(
    trajectories: Sequence[Trajectory], *, max_pack_tokens: int, shares: Sequence[float]
) -> list[tuple[Pack | None, ...]]:
    """As few rounds as the greedy placement finds.

    Args:
        trajectories: Any number, of any lengths.
        max_pack_tokens: Tokens of a pack of the process with the largest share.
        shares: Relative capacity of each process, above 0; only the ratios matter.

    Returns:
        Rounds of `len(shares)` packs; None for a process that has nothing to do.

    Source: longest processing time first on machines of unequal speeds (Gonzalez, Ibarra and Sahni 1977); unequal
    shares by tokens as in AReaL-Hex and HetRL.
    """
    if len(shares) == 1:
        return [(pack,) for pack in pack_trajectories(trajectories, max_pack_tokens=max_pack_tokens)]
    lengths = [int(trajectory.token_ids.size) for trajectory in trajectories]
    # A trajectory longer than a pack takes one pack: counting all of its tokens could exceed the fewest rounds.
    num_tokens = sum(min(length, max_pack_tokens) for length in lengths)
    per_round = tokens_of_a_round(max_pack_tokens, shares=shares)
    for num_rounds in range(math.ceil(num_tokens / per_round), len(lengths) + 1):
        bins = place(lengths, num_rounds=num_rounds, max_pack_tokens=max_pack_tokens, shares=shares)
        if bins is not None:
            packs = [join(trajectories, members) if members else None for members in bins]
            rounds = [tuple(packs[first : first + len(shares)]) for first in range(0, len(packs), len(shares))]
            return [packs for packs in rounds if any(packs)]
    return []


def tokens_of_a_round(max_pack_tokens: int, *, shares: Sequence[float]) -> int:
    """Maximum tokens that all processes together take in a round, at least 1."""
    return max(1, int(max_pack_tokens * sum(shares) / max(shares)))


def place(
    lengths: Sequence[int], *, num_rounds: int, max_pack_tokens: int, shares: Sequence[float]
) -> list[list[int]] | None:
    """Indices into `lengths` for every process of every round, round by round; None if they do not fit."""
    speeds = [share / max(shares) for share in shares] * num_rounds
    bins: list[list[int]] = [[] for _ in speeds]
    loads = [0] * len(speeds)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        # An item longer than any pack is alone in its pack; all others fit into a pack of the strongest.
        room = max(max_pack_tokens, length)
        roomy = [b for b, load in enumerate(loads) if load + length <= room * speeds[b]]
        if not roomy:
            return None
        chosen = min(roomy, key=lambda b: (loads[b] + length) / speeds[b])
        bins[chosen].append(index)
        loads[chosen] += length
    return bins
