"""Answers that were paid for, by the digest of the whole request; bounded in bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

_OVERHEAD_BYTES = 512
"""Of an entry, beside its texts: keys, objects, the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an endpoint answered."""

    content: str
    model: str
    """The model that says to have answered."""
    fingerprint: str
    """Its `system_fingerprint`; empty if it has none."""

    @property
    def answered_by(self) -> str:
        """Both in one text."""
        return f"{self.model}@{self.fingerprint}" if self.fingerprint else self.model


class AnswerCache:
    """Forgets the least recently used first."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self.num_bytes = 0

    @staticmethod
    def key(*parts: object) -> bytes:
        """The digest of everything that an answer depends on."""
        return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).digest()

    def get(self, key: bytes) -> Answer | None:
        """The answer kept under `key`."""
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()
        self.num_bytes = 0

    def put(self, key: bytes, answer: Answer) -> None:
        """Keep an answer, if it fits at all."""
        if key in self._answers:
            self.num_bytes -= _size(self._answers.pop(key))
        if _size(answer) > self._max_bytes:
            return
        self._answers[key] = answer
        self.num_bytes += _size(answer)
        while self.num_bytes > self._max_bytes:
            _, forgotten = self._answers.popitem(last=False)
            self.num_bytes -= _size(forgotten)


def _size(answer: Answer) -> int:
    # Python holds a text in up to four bytes a character.
    return _OVERHEAD_BYTES + 4 * (len(answer.content) + len(answer.model) + len(answer.fingerprint))
