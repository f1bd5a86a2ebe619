"""Receives puts that arrive in parts into memory, in order, until they are complete.

Promises:
- A stream receives one such put at a time, and all streams of a run together at most MAX_RECEIVING_BYTES at
  once, or one put that is larger by itself.
- A put for which there is no capacity is refused at its first part; nothing of it is kept.
- A producer that goes silent within a put loses its stream and its reserved capacity after MAX_PART_SILENCE_S.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.errors import DeadlineError, InvalidFieldError
from penstock.v1 import broker_pb2
from penstock.wire.pieces import MAX_GROUP_BYTES
from services.broker.runtime.run_replica import RunReplica

MAX_RECEIVING_BYTES = 512 * 1024 * 1024
MAX_PART_SILENCE_S = 30.0

_Request = broker_pb2.PutTrajectoriesRequest


@dataclass(slots=True, kw_only=True)
class _Incoming:
    put_id: str
    total_bytes: int
    data: bytearray = field(default_factory=bytearray)


class PutParts:
    """The put that one stream receives."""

    def __init__(self) -> None:
        self._replica: RunReplica | None = None
        self._incoming: _Incoming | None = None
        self._refused: str | None = None
        """The put whose other parts are ignored."""
        self._heard_s = 0.0

    def begins(self, request: _Request) -> bool:
        """Whether a part is its put's first one. Raises InvalidFieldError if its numbers are impossible."""
        total_bytes, end = request.total_bytes, request.offset + len(request.groups)
        if not 1 <= total_bytes <= MAX_GROUP_BYTES:
            raise InvalidFieldError(
                f"total_bytes: {total_bytes}; a put has 1 to {MAX_GROUP_BYTES} bytes: send fewer groups, or lower the "
                "run's group_size or max_completion_tokens",
                field="total_bytes",
            )
        if not request.groups or end > total_bytes:
            raise InvalidFieldError(
                f"groups: bytes {request.offset} to {end} of {total_bytes}; a part is not empty and ends within them",
                field="groups",
            )
        return request.offset == 0

    def has_room(self, replica: RunReplica, total_bytes: int) -> bool:
        """Whether a put may begin now."""
        others = replica.receiving_bytes - self._reserved_bytes
        return not others or others + total_bytes <= MAX_RECEIVING_BYTES

    def begin(self, replica: RunReplica, request: _Request) -> None:
        """Take the first part, replacing a put that was not completed."""
        self.release()
        self._replica, self._refused = replica, None
        self._heard_s = asyncio.get_running_loop().time()
        self._incoming = _Incoming(put_id=request.put_id, total_bytes=request.total_bytes)
        replica.receiving_bytes += request.total_bytes

    def refuse(self, request: _Request) -> None:
        """Ignore the put that begins with this part."""
        self.release()
        self._refused = request.put_id

    def is_refused(self, request: _Request) -> bool:
        """Whether a later part belongs to a put that was refused."""
        return self._incoming is None and request.put_id == self._refused

    def add(self, request: _Request) -> tuple[int, memoryview | None]:
        """Take a part; returns the bytes received so far, and the payload after the last. Raises InvalidFieldError."""
        incoming = self._incoming
        if incoming is None or (incoming.put_id, incoming.total_bytes) != (request.put_id, request.total_bytes):
            raise InvalidFieldError(
                f"put_id: a part of {request.put_id!r} without its first one before it", field="put_id"
            )
        if request.offset != len(incoming.data):
            raise InvalidFieldError(
                f"offset: {request.offset}; the next part of {request.put_id!r} begins at {len(incoming.data)}",
                field="offset",
            )
        incoming.data += request.groups
        self._heard_s = asyncio.get_running_loop().time()
        num_bytes = len(incoming.data)
        if num_bytes < incoming.total_bytes:
            return num_bytes, None
        self._incoming = None
        return num_bytes, memoryview(incoming.data)

    @staticmethod
    def give_back(replica: RunReplica, total_bytes: int) -> None:
        """Release the capacity of a complete put that was stored or refused, so that others may begin."""
        replica.receiving_bytes -= total_bytes
        replica.wake()

    def check(self) -> None:
        """Raise DeadlineError if the next part of a put is overdue."""
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        if self._incoming is not None and silent_s > MAX_PART_SILENCE_S:
            raise DeadlineError(
                f"groups: no part of put {self._incoming.put_id!r} came for {MAX_PART_SILENCE_S:.0f} s; send it again"
            )

    def release(self) -> None:
        """Discard the received parts of an incomplete put."""
        if self._replica is not None:
            self._replica.receiving_bytes -= self._reserved_bytes
        self._incoming = None

    @property
    def _reserved_bytes(self) -> int:
        return 0 if self._incoming is None else self._incoming.total_bytes
