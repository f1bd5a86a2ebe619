"""Holds the checked properties of a put's groups in columns: nearly always all share one outcome. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from penstock.wire.routes import NO_ROUTES, RouteFacts


@dataclass(slots=True, kw_only=True)
class PutGroup:
    """The checked properties of one group. All lists are by sample."""

    group_id: str
    fault: str
    """Why it is malformed, in which case no later field is set; empty if it is valid."""
    sample_tokens: Sequence[int]
    """Completion tokens."""
    min_versions: Sequence[int]
    max_versions: Sequence[int]
    rewards: Sequence[float]
    num_prompt_tokens: int
    routes: Sequence[RouteFacts]


@dataclass(slots=True, kw_only=True)
class PutGroups:
    """The groups of a put, in its order: by group down to `num_samples`, then by sample, group by group.

    A malformed group has no samples here.
    """

    group_ids: list[str] = field(default_factory=list)
    slices: list[tuple[int, int]] = field(default_factory=list)
    """Position of each in the request's bytes."""
    faults: list[str] = field(default_factory=list)
    """Why each is malformed; empty if it is valid."""
    num_prompt_tokens: list[int] = field(default_factory=list)
    num_samples: list[int] = field(default_factory=list)
    sample_tokens: list[int] = field(default_factory=list)
    """Completion tokens."""
    min_versions: list[int] = field(default_factory=list)
    max_versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    routes: list[RouteFacts] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Iterable[PutGroups]) -> PutGroups:
        """The groups of all parts, concatenated."""
        whole = cls()
        for part in parts:
            for name in cls.__slots__:
                getattr(whole, name).extend(getattr(part, name))
        return whole

    def __len__(self) -> int:
        return len(self.group_ids)

    def __iter__(self) -> Iterator[PutGroup]:
        """The groups one by one."""
        for position, (start, end) in enumerate(self.sample_slices()):
            yield PutGroup(
                group_id=self.group_ids[position],
                fault=self.faults[position],
                sample_tokens=self.sample_tokens[start:end],
                min_versions=self.min_versions[start:end],
                max_versions=self.max_versions[start:end],
                rewards=self.rewards[start:end],
                num_prompt_tokens=self.num_prompt_tokens[position],
                routes=self.routes[start:end],
            )

    def worst(self) -> PutGroup:
        """A summary that fits only if every group fits; for groups none of which is malformed or has routes."""
        return PutGroup(
            group_id="",
            fault="",
            sample_tokens=[max(self.sample_tokens)] * max(self.num_samples),
            min_versions=[min(self.min_versions)],
            max_versions=[max(self.max_versions)],
            rewards=[],
            num_prompt_tokens=0,
            routes=[NO_ROUTES] * max(self.num_samples),
        )

    def sample_slices(self) -> list[tuple[int, int]]:
        """Start and end of each group's samples."""
        ends = list(accumulate(self.num_samples))
        return list(zip([0, *ends[:-1]], ends, strict=True))
