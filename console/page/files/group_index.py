"""Says where the groups of a recording are: by step, and by prompt. Some 60 bytes a group, whatever its length."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import numpy as np

from console.recording.reader import RunIndex

MAX_GROUPS = 500_000
"""Beyond it the older half is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """What a row says of its group."""

    policy_version: int
    history: int
    group_id: bytes
    prompt: bytes
    """The prompt as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where rows of one group lie side by side."""

    part: int
    """File of the recording, counted from 1."""
    begin: int
    """Byte of the file, or row of the row group, at which they begin."""
    end: int
    """Where they end."""
    row_group: int = -1
    """Of a parquet file."""


class GroupIndex:
    """Groups in the order in which they were recorded, numbered from 0."""

    def __init__(self, *, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # Policy version, history, part, row group, begin, end, digest of the group's id and of its prompt.
        self._columns = tuple(array("q") for _ in range(8))
        self._history = RunIndex()
        self._last: tuple[int, int, bytes, int, int] | None = None
        self.num_forgotten = 0
        """Groups of old steps that are no longer known."""

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, head: GroupHead, place: Place) -> None:
        """Take in a row, or several rows side by side of one group."""
        key = (head.policy_version, head.history, head.group_id, place.part, place.row_group)
        ends = self._columns[5]
        if key == self._last and ends[-1] == place.begin:
            ends[-1] = place.end
            return
        self._last = key
        self._history.note(head.policy_version, head.history)
        numbers = (head.policy_version, head.history, place.part, place.row_group, place.begin, place.end)
        for column, number in zip(self._columns, (*numbers, digest(head.group_id), digest(head.prompt)), strict=True):
            column.append(number)
        if len(self) > self._max_groups:
            half = len(self) // 2
            for column in self._columns:
                del column[:half]
            self.num_forgotten += half

    def steps(self) -> list[int]:
        """Policy versions of the surviving history that have samples, ascending."""
        pairs = np.unique(np.stack([np.array(self._columns[0]), np.array(self._columns[1])]), axis=1)
        return sorted({version for version, history in pairs.T.tolist() if not self._is_void(version, history)})

    def of_step(self, version: int, group_id: str | None = None) -> list[int]:
        """The groups that were trained in the step of that version, or only those with that id."""
        versions, histories, groups = (np.array(self._columns[index]) for index in (0, 1, 6))
        is_meant = versions == version
        if group_id is not None:
            is_meant &= groups == digest(group_id.encode())
        found = np.flatnonzero(is_meant).tolist()
        return [number for number in found if not self._is_void(version, int(histories[number]))]

    def newest_step_of(self, group_id: str) -> int:
        """The version of the newest step that trained a group of that id; 0 if none did."""
        found = np.flatnonzero(np.array(self._columns[6]) == digest(group_id.encode())).tolist()
        versions = (self.version(one) for one in found if not self._is_void(self.version(one), self._columns[1][one]))
        return max(versions, default=0)

    def same_prompt(self, numbers: list[int]) -> dict[int, list[int]]:
        """For each of these groups all groups of the surviving history with the same prompt, in order."""
        prompts = np.array(self._columns[7])
        wanted = np.unique(prompts[numbers]) if numbers else prompts[:0]
        found: dict[int, list[int]] = {}
        for number in np.flatnonzero(np.isin(prompts, wanted)).tolist():
            if not self._is_void(self.version(number), self._columns[1][number]):
                found.setdefault(int(prompts[number]), []).append(number)
        return {number: found.get(int(prompts[number]), []) for number in numbers}

    def version(self, number: int) -> int:
        """The version that the step of a group produced."""
        return self._columns[0][number]

    def place(self, number: int) -> Place:
        """Where the rows of a group are."""
        _, _, part, row_group, begin, end, _, _ = (column[number] for column in self._columns)
        return Place(part=part, begin=begin, end=end, row_group=row_group)

    def _is_void(self, version: int, history: int) -> bool:
        return self._history.is_void(policy_version=version, history=history)


def digest(text: bytes) -> int:
    """64 bits of a text, as a signed number."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)
