"""The receiver's side of broadcasts: received chunks are checked one by one, missing ones are left to be fetched.

Promises:

- A broadcast never makes a fetch fail: a group that does not form, breaks off or sends other bytes leaves chunks
  missing, and those are fetched.
- Every wait ends: asking for a place after JOIN_TIMEOUT_S, forming and every piece after the group's stall time-out.
- The connections of a group are kept for the next broadcast to the same members.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from penstock.clients.weights import WeightsClient, content_id
from penstock.collective.broadcast_backend import BACKENDS, Transport
from penstock.collective.group import BroadcastGroup, Rendezvous, load_library, split_address
from penstock.collective.place import BroadcastError, GroupPlace
from penstock.errors import DigestMismatchError, NotOfferedError, PenstockError
from penstock.process.logger import get_logger
from penstock.transfer.partial import PartialContent
from penstock.v1 import weights_pb2

MAX_RANKS = 1024
MAX_PIECE_BYTES = 256 * 1024**2
MAX_STALL_S = 600.0
MAX_NAME_CHARACTERS = 128

_log = get_logger()


class BroadcastReceiver:
    """Takes part in the broadcasts of one weight store; an async context manager that owns a group.

    Args:
        client: The weight store.
        backend: The library, GLOO or NCCL.
        on_received: Called with the number of bytes received, as they arrive.
        on_end: Called with "ok" or "failed" after each broadcast it took part in.
    """

    def __init__(
        self,
        client: WeightsClient,
        *,
        backend: Transport,
        on_received: Callable[[int], None] = lambda _num_bytes: None,
        on_end: Callable[[str], None] = lambda _outcome: None,
    ) -> None:
        self._client = client
        self._backend = backend
        self._on_received = on_received
        self._on_end = on_end
        self._rendezvous: Rendezvous | None = None
        self._group: BroadcastGroup | None = None

    async def __aenter__(self) -> Self:
        """Get ready to join."""
        await asyncio.to_thread(load_library)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Leave the group."""
        self._leave()

    async def receive(
        self,
        manifest: weights_pb2.WeightsManifest,
        content: PartialContent,
        on_refused: Callable[[DigestMismatchError], None],
    ) -> int:
        """Receive a content's chunks from a broadcast, if there is one; returns the number of bytes received.

        Raises OSError: The content cannot be written.
        """
        identity = content_id(manifest)
        open_group_id = self._group.place.group_id if self._group is not None and self._group.is_usable else ""
        try:
            answer = await self._client.join_broadcast(
                identity, backend=BACKENDS[self._backend], open_group_id=open_group_id
            )
            place = _checked_place(answer, self._backend)
        except PenstockError as error:
            level = _log.debug if isinstance(error, NotOfferedError) else _log.info
            level("no broadcast; fetching", policy_version=manifest.policy_version, error=str(error))
            return 0
        key = f"{place.group_id}/end/{answer.sequence}/{place.rank}"
        outcome, num_bytes = "left", 0
        try:
            group = await self._join(answer.store_address, place)
            async for piece_bytes in _take(group, content, on_refused):
                num_bytes += piece_bytes
                self._on_received(piece_bytes)
            outcome = "ok"
        except BroadcastError as error:
            outcome = "failed"
            _log.warning(
                "broadcast failed; fetching the rest", policy_version=manifest.policy_version, error=str(error)
            )
        finally:
            await self._end(key, outcome)
        return num_bytes

    async def _join(self, address: str, place: GroupPlace) -> BroadcastGroup:
        if self._group is not None and self._group.is_usable and self._group.place == place:
            return self._group
        self._leave()
        # Kept even if the group does not form: the others are notified through it.
        rendezvous = self._rendezvous = await asyncio.to_thread(Rendezvous.connect, address, stall_s=place.stall_s)
        self._group = await asyncio.to_thread(rendezvous.form, place, bind_host=_own_host(address))
        return self._group

    async def _end(self, key: str, outcome: str) -> None:
        self._on_end("ok" if outcome == "ok" else "failed")
        rendezvous = self._rendezvous
        if outcome != "ok":
            self._leave()
        if rendezvous is not None:
            with contextlib.suppress(BroadcastError):
                await asyncio.to_thread(rendezvous.set, key, outcome)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._rendezvous = None


async def _take(
    group: BroadcastGroup, content: PartialContent, on_refused: Callable[[DigestMismatchError], None]
) -> AsyncIterator[int]:
    """Store a content's chunks as they arrive; yields the size of each piece."""
    pieces = group.receive(content.size_bytes)
    index = 0
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            chunks = list(_chunks_in(piece, content, first=index))
            index += len(chunks)
            for stored in await asyncio.gather(
                *(content.store(index, data) for index, data in chunks), return_exceptions=True
            ):
                if isinstance(stored, DigestMismatchError):
                    on_refused(stored)
                elif stored is not None:
                    raise stored
            yield piece.nbytes
    except BaseException:
        # Also where this task is cancelled while a thread waits for the next piece.
        group.abort()
        raise


def _chunks_in(piece: memoryview, content: PartialContent, *, first: int) -> Iterator[tuple[int, memoryview]]:
    """The chunks that make up a piece, by index."""
    begin, index = 0, first
    while begin < piece.nbytes:
        end = begin + content.chunk(index).size_bytes
        if end > piece.nbytes:
            raise BroadcastError("its pieces do not end where chunks do")
        yield index, piece[begin:end]
        begin, index = end, index + 1


def _checked_place(answer: weights_pb2.JoinBroadcastResponse, backend: Transport) -> GroupPlace:
    stall_s = answer.stall_timeout.ToTimedelta().total_seconds()
    is_sound = (
        1 <= answer.rank < answer.num_ranks <= MAX_RANKS
        and 1 <= answer.piece_bytes <= MAX_PIECE_BYTES
        and 0 < stall_s <= MAX_STALL_S
        and 1 <= len(answer.group_id) <= MAX_NAME_CHARACTERS
    )
    if not is_sound:
        raise BroadcastError(
            f"rank {answer.rank} of {answer.num_ranks}, pieces of {answer.piece_bytes} bytes, {stall_s:g} s: "
            "no sound place in a broadcast"
        )
    return GroupPlace(
        group_id=answer.group_id,
        rank=answer.rank,
        num_ranks=answer.num_ranks,
        backend=backend,
        stall_s=stall_s,
        piece_bytes=answer.piece_bytes,
    )


def _own_host(peer: str) -> str:
    """The address of this machine that `peer` sees."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*split_address(peer), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Sends nothing: it only looks up the route that packets would take.
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BroadcastError(f"no way to {peer}: {error}") from error
