"""Packs trajectories without padding, for one forward pass of the trainer each.

A pack is one row of T tokens: whole trajectories (segments) one after the other, position ids starting again at 0 in
each. Attention is causal inside a segment and absent between segments; the backend derives that from
`segment_lengths`, so no [T, T] mask exists.

Invariants:
- Every trajectory lies whole in exactly one pack; packing never cuts, drops or reorders tokens.
- A pack holds at most `max_pack_tokens` tokens, unless it is a single longer trajectory.
- Same trajectories in the same order, same packs: packing is deterministic.
- Of trajectories that arrive one by one, less than one pack's worth waits for others.

Axes: T tokens of a row, S segments, N loss tokens (those the policy sampled).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.wire.routes import Routes

_Item = TypeVar("_Item")
_Float = TypeVar("_Float", bound=np.floating)

FULL_ENOUGH = 0.9
"""Share of the token budget at which a pack stops waiting for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The token-aligned training view of one sample; all arrays have the same length T >= 2.

    Example: prompt [5, 6], completion [7, 8] gives token_ids [5, 6, 7, 8], loss_mask [F, F, T, T].
    """

    token_ids: npt.NDArray[np.int32]
    """int32[T], prompt and completion."""
    loss_mask: npt.NDArray[np.bool_]
    """bool[T], true where the policy sampled the token; false at 0, which nothing predicts."""
    behavior_logprobs: npt.NDArray[np.float32]
    """float32[T], nats, of each token under the weights that sampled it; unread where the mask is false."""
    advantages: npt.NDArray[np.float32]
    """float32[T]; unread where the mask is false."""
    values: npt.NDArray[np.float32] | None = None
    """float32[T], a critic's value of each token's state; unread likewise. None without a critic."""
    returns: npt.NDArray[np.float32] | None = None
    """float32[T], the critic's targets; likewise."""
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """float32[T], nats, of each token under the weights before the batch's first optimiser step; likewise. None if
    those are the weights being trained."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """float32[T], nats, of each token under the reference; likewise. None if the backend computes them itself, or if
    the loss does not use them."""
    routes: Routes | None = None
    """[T, layers, experts_per_token], the experts to take at each position. None leaves them to the router."""
    temperature: float = 1.0
    """Sampling temperature of the loss tokens, > 0: log-probs are of logits / temperature."""
    group_id: str = ""
    """Id of the sample group; read only to name a group whose numbers are not finite."""

    def __post_init__(self) -> None:
        """Refuses arrays that do not line up.

        Raises:
            ValueError: lengths differ, fewer than two tokens, or the first token is a loss token.
        """
        shape = self.token_ids.shape
        aligned = [self.loss_mask, self.behavior_logprobs, self.advantages]
        optional = (self.values, self.returns, self.proximal_logprobs, self.reference_logprobs)
        aligned += [array for array in optional if array is not None]
        if len(shape) != 1 or shape[0] < 2 or any(array.shape != shape for array in aligned):
            raise ValueError("the arrays of a trajectory must all have shape [T] with T >= 2")
        if self.routes is not None and self.routes.shape[:1] != shape:
            raise ValueError(f"routes: {len(self.routes)} rows for {shape[0]} tokens")
        if self.loss_mask[0]:
            raise ValueError("the first token of a trajectory has no predecessor and cannot be a loss token")

    def spread(self, of_loss_tokens: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Numbers of the loss tokens at their positions, float32[T], zeros elsewhere."""
        result = np.zeros(self.token_ids.shape, dtype=np.float32)
        result[self.loss_mask] = of_loss_tokens
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One row for one forward pass."""

    token_ids: npt.NDArray[np.int64]
    """int64[T]."""
    position_ids: npt.NDArray[np.int64]
    """int64[T], 0, 1, 2... within each segment."""
    segment_lengths: tuple[int, ...]
    """[S], tokens of each segment in row order; they sum to T."""
    logit_positions: npt.NDArray[np.int64]
    """int64[N], the row positions whose logits predict the loss tokens: one before each."""
    target_ids: npt.NDArray[np.int64]
    """int64[N], the loss tokens."""
    target_segments: npt.NDArray[np.int64]
    """int64[N], the segment each loss token belongs to, for losses that reduce by sample."""
    behavior_logprobs: npt.NDArray[np.float32]
    """float32[N], nats."""
    advantages: npt.NDArray[np.float32]
    """float32[N]."""
    members: tuple[int, ...]
    """[S], which of the trajectories that were packed together each segment is."""
    values: npt.NDArray[np.float32] | None = None
    """float32[N], as in `Trajectory`; None if any trajectory has none."""
    returns: npt.NDArray[np.float32] | None = None
    """float32[N], likewise."""
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """float32[N], likewise."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """float32[N], likewise."""
    temperatures: npt.NDArray[np.float32] | None = None
    """float32[N], sampling temperature of each loss token; None if all are 1."""
    routes: Routes | None = None
    """[T, layers, experts_per_token], as in `Trajectory`; None if any trajectory has none."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, T."""
        return int(self.token_ids.size)

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens in the row, N."""
        return int(self.target_ids.size)

    def by_member(self, of_loss_tokens: npt.NDArray[_Float]) -> Iterator[tuple[int, npt.NDArray[_Float]]]:
        """Splits numbers of the row's loss tokens, [N], by trajectory; yields each with its member index."""
        bounds = np.searchsorted(self.target_segments, np.arange(len(self.members) + 1))
        for segment, member in enumerate(self.members):
            yield member, of_loss_tokens[bounds[segment] : bounds[segment + 1]]


def pack_trajectories(trajectories: Sequence[Trajectory], *, max_pack_tokens: int) -> list[Pack]:
    """Fills as few packs as first-fit decreasing finds.

    Args:
        trajectories: any number, of any lengths.
        max_pack_tokens: tokens a pack may hold; a longer trajectory gets a pack of its own.

    Returns:
        Packs holding each trajectory once; empty for no trajectories.

    Raises:
        ValueError: `max_pack_tokens` is not positive.

    Source: first-fit decreasing, at most 11/9 of the optimum + 6/9 packs (Dosa 2007).
    """
    lengths = [int(trajectory.token_ids.size) for trajectory in trajectories]
    bins = first_fit_decreasing(lengths, capacity=max_pack_tokens)
    return [join(trajectories, members) for members in bins]


def full_enough(items: Sequence[_Item], *, lengths: Sequence[int], capacity: int) -> tuple[list[_Item], list[_Item]]:
    """Items to pack now and items that wait: the emptiest pack waits if it is less than FULL_ENOUGH full.

    Much of the cost of a forward pass does not depend on its tokens, so a nearly empty one should wait for more. All
    other packs go ahead, however full: no later arrival is certain to fit better.

    Args:
        items: Waiting and new items, any number.
        lengths: Tokens of each.
        capacity: Tokens of a pack, or of a round of packs.

    Raises:
        ValueError: `capacity` is not positive.
    """
    bins = first_fit_decreasing(lengths, capacity=capacity)
    emptiest = min(bins, key=lambda members: sum(lengths[index] for index in members), default=[])
    if sum(lengths[index] for index in emptiest) >= FULL_ENOUGH * capacity:
        emptiest = []
    waiting = set(emptiest)
    return (
        [item for index, item in enumerate(items) if index not in waiting],
        [item for index, item in enumerate(items) if index in waiting],
    )


def first_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Assigns items to bins: longest first, each to the first bin with space.

    Returns:
        Indices into `lengths` by bin, in order of placement. An item longer than `capacity` is alone in its bin.

    Raises:
        ValueError: `capacity` is not positive.
    """
    if capacity <= 0:
        raise ValueError(f"capacity must be positive, not {capacity}")
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((b for b, room in enumerate(rooms) if room >= length), None)
        if place is None:
            bins.append([index])
            rooms.append(capacity - length)
        else:
            bins[place].append(index)
            rooms[place] -= length
    return bins


def join(trajectories: Sequence[Trajectory], indices: Sequence[int]) -> Pack:
    """One pack of those trajectories, at least one, in the order of `indices`."""
    members = [trajectories[index] for index in indices]
    lengths = np.array([member.token_ids.size for member in members], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    token_ids = np.concatenate([member.token_ids for member in members]).astype(np.int64)
    targets = np.flatnonzero(np.concatenate([member.loss_mask for member in members]))
    segments = np.repeat(np.arange(len(members), dtype=np.int64), lengths)
    return Pack(
        token_ids=token_ids,
        position_ids=np.arange(token_ids.size, dtype=np.int64) - np.repeat(starts, lengths),
        segment_lengths=tuple(lengths.tolist()),
        logit_positions=targets - 1,
        target_ids=token_ids[targets],
        target_segments=segments[targets],
        behavior_logprobs=np.concatenate([member.behavior_logprobs for member in members])[targets],
        advantages=np.concatenate([member.advantages for member in members])[targets],
        members=tuple(indices),
        values=_joined([member.values for member in members], targets),
        returns=_joined([member.returns for member in members], targets),
        proximal_logprobs=_joined([member.proximal_logprobs for member in members], targets),
        reference_logprobs=_joined([member.reference_logprobs for member in members], targets),
        temperatures=_temperatures(members, segments[targets]),
        routes=_joined_routes([member.routes for member in members]),
    )


def divide(pack: Pack, most: int) -> list[Pack]:
    """At most that many packs of the row's segments, in order, of as even lengths as whole segments allow."""
    ends = np.cumsum(pack.segment_lengths)
    # A segment goes where its middle lies.
    middles = ends - np.array(pack.segment_lengths) / 2
    places = np.minimum(middles * most // ends[-1], most - 1)
    firsts = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist()]
    return [_segments(pack, first, stop) for first, stop in zip(firsts, [*firsts[1:], len(ends)], strict=True)]


def _segments(pack: Pack, first: int, stop: int) -> Pack:
    """The segments from `first` up to `stop` alone."""
    start, end = sum(pack.segment_lengths[:first]), sum(pack.segment_lengths[:stop])
    targets = slice(*np.searchsorted(pack.target_segments, [first, stop]).tolist())

    def cut(array: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32] | None:
        return None if array is None else array[targets]

    return Pack(
        token_ids=pack.token_ids[start:end],
        position_ids=pack.position_ids[start:end],
        segment_lengths=pack.segment_lengths[first:stop],
        logit_positions=pack.logit_positions[targets] - start,
        target_ids=pack.target_ids[targets],
        target_segments=pack.target_segments[targets] - first,
        behavior_logprobs=pack.behavior_logprobs[targets],
        advantages=pack.advantages[targets],
        members=pack.members[first:stop],
        values=cut(pack.values),
        returns=cut(pack.returns),
        proximal_logprobs=cut(pack.proximal_logprobs),
        reference_logprobs=cut(pack.reference_logprobs),
        temperatures=cut(pack.temperatures),
        routes=None if pack.routes is None else pack.routes[start:end],
    )


def _temperatures(
    members: Sequence[Trajectory], target_segments: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32] | None:
    temperatures = np.array([member.temperature for member in members], dtype=np.float32)
    return None if (temperatures == 1.0).all() else temperatures[target_segments]


def _joined(
    arrays: Sequence[npt.NDArray[np.float32] | None], targets: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32] | None:
    known = [array for array in arrays if array is not None]
    return np.concatenate(known)[targets] if len(known) == len(arrays) else None


def _joined_routes(parts: Sequence[Routes | None]) -> Routes | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
