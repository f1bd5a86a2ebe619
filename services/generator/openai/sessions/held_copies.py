"""Holds copies of other generators' sessions, to hand them out, each once, when those are gone. Pure.

Promises:
- A session whose copy was handed out is its former owner's no longer: whatever that sends of it is refused.
- Copies are bounded in number and bytes, and kept for a limited time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_BYTES = 512 * 1024 * 1024
MAX_REMEMBERED = 100_000
"""Sessions that are remembered as handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A copy."""

    owner: str
    """The process that has the session."""
    task: str
    data: bytes
    put_s: float
    """When it came, by the monotonic clock."""


class HeldCopies:
    """The copies that this process holds."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, Held] = {}
        self._taken: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Owner and session."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, session_id: str, held: Held) -> bool:
        """Hold a copy in place of the session's earlier one; whether there is room for it."""
        before = self._held.get(session_id)
        num_bytes = self._num_bytes + len(held.data) - (0 if before is None else len(before.data))
        if num_bytes > self._max_bytes:
            return False
        self._held[session_id] = held
        self._num_bytes = num_bytes
        return True

    def was_taken(self, owner: str, session_id: str) -> bool:
        """Whether the owner's session is another's by now."""
        return (owner, session_id) in self._taken

    def release(self, owner: str, session_id: str) -> None:
        """Forget the owner's copy."""
        held = self._held.get(session_id)
        if held is not None and held.owner == owner:
            self._remove(session_id)

    def find(self, session_id: str, task: str) -> dict[str, list[str]]:
        """Sessions by owner: that one, and all of the task, or of its own if that is empty."""
        if not task and session_id in self._held:
            task = self._held[session_id].task
        found: dict[str, list[str]] = {}
        for each, held in self._held.items():
            if each == session_id or (task and held.task == task):
                found.setdefault(held.owner, []).append(each)
        return found

    def older_than(self, time_s: float) -> dict[str, list[str]]:
        """Sessions by owner whose copies came before."""
        found: dict[str, list[str]] = {}
        for each, held in self._held.items():
            if held.put_s < time_s:
                found.setdefault(held.owner, []).append(each)
        return found

    def take(self, owner: str, session_ids: list[str]) -> list[Held]:
        """Hand out the owner's copies that are still here, for good."""
        taken = []
        for session_id in session_ids:
            held = self._held.get(session_id)
            if held is not None and held.owner == owner:
                self._remove(session_id)
                self._taken[owner, session_id] = None
                taken.append(held)
        while len(self._taken) > MAX_REMEMBERED:
            self._taken.popitem(last=False)
        return taken

    def _remove(self, session_id: str) -> None:
        self._num_bytes -= len(self._held.pop(session_id).data)
