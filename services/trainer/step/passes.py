"""Makes forward and backward passes over the samples of a step, and splits it into minibatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.trainer.batches.packing import Pack, Trajectory
from services.trainer.batches.rank_partition import partition, tokens_of_a_round
from services.trainer.model.backend import LossTotals, NonFiniteLossError, StepBackend

Gaps = dict[tuple[str, int], npt.NDArray[np.float16]]
"""By group id and sample index: log-prob under the weights of the pass less that of the engine that sampled, nats, of
each loss token, float16[L]."""
MAX_GAP = 1000.0
"""Larger ones are kept as that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossItem:
    """A sample's contribution to the loss and its divisor."""

    group_id: str
    sample_index: int
    num_tokens: int
    """Prompt and completion."""
    num_loss_tokens: int
    trajectory: Trajectory | None
    """None if it has no gradient, or its gradient was already added; it still counts in the divisor."""


class Passes:
    """Makes the passes for gradients, and counts them.

    Args:
        backend: Computes.
        max_pack_tokens: Token budget of one pack.
        check: Called before each pass that may be cancelled; raises to do so.
        keeps_gaps: Whether the log-prob gaps of all samples are kept.
    """

    def __init__(
        self, backend: StepBackend, *, max_pack_tokens: int, check: Callable[[], None], keeps_gaps: bool = False
    ) -> None:
        self._backend = backend
        self._max_pack_tokens = max_pack_tokens
        self._check = check
        self.round_tokens = tokens_of_a_round(max_pack_tokens, shares=backend.shares)
        self.num_packs = 0
        self.num_tokens = 0
        """Tokens that went through the model."""
        self.num_budgeted_tokens = 0
        """Token capacity of those passes."""
        self.totals = LossTotals()
        self.gaps: Gaps = {}
        """Of the samples that went through the model, if they are kept."""
        self._keeps_gaps = keeps_gaps

    def run(self, items: Sequence[LossItem], *, may_stop: bool) -> None:
        """Adds the gradients of `items`.

        Raises:
            NonFiniteLossError: A loss is not finite; the error names the groups of the pass.
        """
        passed = [item for item in items if item.trajectory is not None]
        trajectories = trajectories_of(passed)
        rounds = partition(trajectories, max_pack_tokens=self._max_pack_tokens, shares=self._backend.shares)
        for packs in rounds:
            if may_stop:
                self._check()
            found = self._forward_backward(packs, trajectories)
            self.totals = self.totals.merged(replace(found, logprobs=()))
            if self._keeps_gaps:
                self._keep_gaps(packs, found, passed)
        made = [pack for packs in rounds for pack in packs if pack is not None]
        num_tokens = sum(pack.num_tokens for pack in made)
        self.num_tokens += num_tokens
        self.num_budgeted_tokens += max(num_tokens, len(rounds) * self.round_tokens)
        self.num_packs += len(made)

    def _forward_backward(self, packs: Sequence[Pack | None], trajectories: Sequence[Trajectory]) -> LossTotals:
        try:
            return self._backend.forward_backward(*packs)
        except NonFiniteLossError as error:
            members = [member for pack in packs if pack is not None for member in pack.members]
            raise NonFiniteLossError(str(error), (trajectories[member].group_id for member in members)) from error

    def _keep_gaps(self, packs: Sequence[Pack | None], found: LossTotals, passed: Sequence[LossItem]) -> None:
        with_tokens = [pack for pack in packs if pack is not None and pack.num_loss_tokens]
        for pack, logprobs in zip(with_tokens, found.logprobs, strict=True):
            gaps = np.clip(logprobs - pack.behavior_logprobs, -MAX_GAP, MAX_GAP).astype(np.float16)
            for member, of_member in pack.by_member(gaps):
                self.gaps[passed[member].group_id, passed[member].sample_index] = of_member


def trajectories_of(items: Sequence[LossItem]) -> list[Trajectory]:
    """The trajectories of the items that have one, in order."""
    return [item.trajectory for item in items if item.trajectory is not None]


def split(items: Sequence[LossItem], *, num_minibatches: int) -> list[list[LossItem]]:
    """Distributes whole groups to minibatches of about equally many tokens, none empty if there are enough groups.

    Source: longest processing time first (Graham 1969).
    """
    groups: dict[str, list[LossItem]] = defaultdict(list)
    for item in items:
        groups[item.group_id].append(item)
    sizes = {group_id: sum(item.num_tokens for item in group) for group_id, group in groups.items()}
    names: list[list[str]] = [[] for _ in range(num_minibatches)]
    loads = [0] * num_minibatches
    for group_id in sorted(groups, key=lambda group_id: (-sizes[group_id], group_id)):
        lightest = loads.index(min(loads))
        names[lightest].append(group_id)
        loads[lightest] += sizes[group_id]
    return [[item for group_id in sorted(members) for item in groups[group_id]] for members in names]
