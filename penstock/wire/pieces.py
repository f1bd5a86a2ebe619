"""Fills messages up to their limits, and splits groups that are too large for one into pieces, joined again later.

A piece is a run of bytes of a serialized TrajectoryGroup (of TrajectoryGroups in a put), cut at any place, so that
cutting and joining are exact whatever a group holds. A receiver keeps the pieces of one group and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.errors import InvalidFieldError

MAX_GROUP_TOKENS = 1 << 24
"""group_size x max_completion_tokens of a run: more is refused when the run is opened."""
MAX_TOKEN_BYTES = 25
"""Id, log-prob, mask, advantage, and a version run of its own; typically 8. Routes come on top, and lower the tokens of
a group in proportion (`routes.RoutingShape.max_group_tokens`)."""
MAX_GROUP_BYTES = 448 * 1024 * 1024
"""A group that a run of MAX_GROUP_TOKENS allows is never larger: a token takes at most MAX_TOKEN_BYTES, and 48 MiB are
left for prompt, text and the other fields of the samples. Redis takes values of up to 512 MiB."""
MAX_EXPORTED_BYTES = 1536 * 1024 * 1024
"""The same with the text of every completion, which takes at most 4 MiB each and 1 GiB a group."""
MAX_WHOLE_BYTES = 4 * 1024 * 1024
"""A larger group travels in pieces."""
PIECE_BYTES = 1024 * 1024
MAX_CRITIC_PACK_TOKENS = 512 * 1024
"""Of a pack that a critic takes: with its values and returns, 16 bytes a token, it is below gRPC's largest message."""

_Item = TypeVar("_Item")


def batched(
    items: Iterable[_Item], size_of: Callable[[_Item], float], most: float, *, most_items: float = math.inf
) -> Iterator[list[_Item]]:
    """Consecutive items in lists of at most `most` in all and at most `most_items`; a larger item is alone."""
    batch: list[_Item] = []
    total = 0.0
    for item in items:
        size = size_of(item)
        if batch and (total + size > most or len(batch) >= most_items):
            yield batch
            batch, total = [], 0.0
        batch.append(item)
        total += size
    if batch:
        yield batch


def spans(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of a group of this many bytes."""
    for start in range(0, size_bytes, PIECE_BYTES):
        yield start, min(size_bytes, start + PIECE_BYTES)


def joined_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of `parts` in pieces of PIECE_BYTES, the last one may be smaller; copies one piece at a time."""
    piece = bytearray()
    for part in parts:
        view = memoryview(part)
        while view:
            num_bytes = PIECE_BYTES - len(piece)
            piece += view[:num_bytes]
            view = view[num_bytes:]
            if len(piece) == PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


class Assembly:
    """Joins the pieces of one group after the other; holds at most `max_bytes`."""

    def __init__(self, *, max_bytes: int = MAX_GROUP_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def __len__(self) -> int:
        """Bytes of the group under way; 0 between two groups."""
        return len(self._data)

    def add(self, data: bytes, *, is_last: bool) -> bytearray | None:
        """The whole group with its last piece, before that None. Raises InvalidFieldError beyond the bound."""
        if len(self._data) + len(data) > self._max_bytes:
            raise InvalidFieldError(f"piece: a group of more than {self._max_bytes} bytes", field="piece")
        self._data += data
        if not is_last:
            return None
        whole, self._data = self._data, bytearray()
        return whole
