"""Keeps answers for retried requests: the same key in the same session gets the same answer, decoded once.

A client that lost an answer in transit retries. By an `Idempotency-Key`, or the retry count that OpenAI's clients send,
the retry is recognised and gets the answer sampled the first time: from the memory of this process or, where that has
none, from the session's turns, which outlive it (`Agents.repeated`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.generator.openai.formats.api_errors import invalid

KEY_HEADER = "Idempotency-Key"
RETRY_HEADER = "X-Stainless-Retry-Count"
MAX_KEY_CHARACTERS = 255
MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Approximate memory limit of the kept answers of a process; the oldest are evicted first."""
_BYTES_A_BODY_BYTE = 16
_SLOT_BYTES = 4096

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatKey:
    """Identifies retries of a request within its session."""

    session_id: str
    key: str
    body_digest: bytes
    num_bytes: int
    """Approximate memory of the answer and the request."""
    is_repetition: bool
    """Whether a kept answer may be reused; a first request without a key gets a new one."""

    @property
    def digest(self) -> bytes:
        """Of the key, to keep it with the turn that answers it."""
        return hashlib.blake2b(self.key.encode(), digest_size=16).digest()

    def check_body(self, body_digest: bytes) -> None:
        """Raise ApiError unless the key was used for the same request."""
        if body_digest != self.body_digest:
            raise invalid(KEY_HEADER, f"{self.key!r:.80} came with another request before: use a new key")


@dataclass(slots=True, eq=False)
class Slot(Generic[_Made]):
    """The answer to one key."""

    body_digest: bytes
    num_bytes: int
    made: _Made | None = None
    """None until it is made."""
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class KeptAnswers(Generic[_Made]):
    """The newest answers of all sessions, by key."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._slots: OrderedDict[tuple[str, str], Slot[_Made]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, key: RepeatKey) -> AsyncIterator[Slot[_Made]]:
        """The slot of a key, for one request at a time: others with the same key wait until it is answered.

        Raises ApiError if the key was used for a different request.
        """
        name = (key.session_id, key.key)
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = Slot(key.body_digest, key.num_bytes)
            self._num_bytes += slot.num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._slots.popitem(last=False)[1].num_bytes
        key.check_body(slot.body_digest)
        async with slot.making:
            if not key.is_repetition:
                slot.made = None
            yield slot


def repeat_key(session_id: str | None, key: str | None, retry_count: str | None, body: bytes) -> RepeatKey | None:
    """The key of a request by its headers; None outside a session. Raises ApiError."""
    if session_id is None:
        return None
    digest = hashlib.blake2b(body, digest_size=16)
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        raise invalid(KEY_HEADER, f"{key!r:.80}; 1 to {MAX_KEY_CHARACTERS} printable ASCII characters")
    is_retry = retry_count is not None and retry_count.isdecimal() and int(retry_count[:9]) > 0
    return RepeatKey(
        session_id=session_id,
        key=f"body {digest.hexdigest()}" if key is None else f"key {key}",
        body_digest=digest.digest(),
        num_bytes=_SLOT_BYTES + _BYTES_A_BODY_BYTE * len(body),
        is_repetition=is_retry or key is not None,
    )
