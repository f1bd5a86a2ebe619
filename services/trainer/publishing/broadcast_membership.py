"""Broadcast membership: which receivers are expected, and which are left out for now.

Promises:

- A receiver is expected if it watches the versions, announced that it joins, came to the last broadcast it could, and
  is not left out.
- A receiver at which a broadcast broke off is left out for a while, twice as long each time in a row; if it cannot be
  distinguished from the others, all of them are. They fetch meanwhile.

Pure bookkeeping: the caller passes the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

FIRST_LEFT_OUT_S = 30.0
MAX_LEFT_OUT_S = 1920.0
OK = "ok"
"""Result of a member that received everything."""
LEFT = "left"
"""Result of a member that left for reasons of its own."""


class BroadcastMembership:
    """The receivers of one weight store; starts empty."""

    def __init__(self) -> None:
        self._watching: Counter[str] = Counter()
        self._absent: set[str] = set()
        self._left_out_until_s: dict[str, float] = {}
        self._num_failures: dict[str, int] = {}

    def arrive(self, receiver_id: str) -> None:
        """A receiver begins to watch; the end of its earlier watch may be noticed only later."""
        self._watching[receiver_id] += 1

    def leave(self, receiver_id: str) -> None:
        """A receiver stopped watching."""
        self._watching[receiver_id] -= 1
        if self._watching[receiver_id] <= 0:
            del self._watching[receiver_id]
            self._absent.discard(receiver_id)
            self._num_failures.pop(receiver_id, None)
            self._left_out_until_s.pop(receiver_id, None)

    def expected(self, *, now_s: float) -> set[str]:
        """The receivers to wait for."""
        return {
            receiver_id
            for receiver_id in self._watching
            if receiver_id not in self._absent and not self.is_left_out(receiver_id, now_s=now_s)
        }

    def is_left_out(self, receiver_id: str, *, now_s: float) -> bool:
        """Whether a receiver has to fetch for now."""
        return now_s < self._left_out_until_s.get(receiver_id, now_s)

    def note_asked(self, receiver_id: str) -> None:
        """A receiver asked for a place: it is expected again."""
        self._absent.discard(receiver_id)

    def note_absent(self, receiver_ids: Collection[str]) -> None:
        """Expected receivers did not come: they are not expected again until they ask."""
        self._absent.update(receiver_ids)

    def note_end(self, words: Mapping[str, str | None], *, is_sent: bool, now_s: float) -> list[str]:
        """A broadcast has ended; returns the receivers that are left out because of it.

        Args:
            words: Each member's reported result; None for one that reported nothing.
            is_sent: Whether the sender noticed no failure.
            now_s: The time.
        """
        failed = [receiver_id for receiver_id, word in words.items() if word != OK]
        for receiver_id in words.keys() - failed:
            self._num_failures.pop(receiver_id, None)
        if is_sent and not failed:
            return []
        to_blame = [receiver_id for receiver_id, word in words.items() if word in (None, LEFT)] or list(words)
        for receiver_id in to_blame:
            num_before = self._num_failures.get(receiver_id, 0)
            self._num_failures[receiver_id] = num_before + 1
            self._left_out_until_s[receiver_id] = now_s + min(FIRST_LEFT_OUT_S * 2**num_before, MAX_LEFT_OUT_S)
        return to_blame
