"""Broadcasts of published contents to receivers on the trainer's own fast network.

    receiver asks for a place -> gathered with others that want the same content -> group -> broadcast -> each reports
                                   until all expected asked, or `gather_s`             |
                              the same group as before where the members are the same -+- else formed again

Promises:

- The broadcast waits at most `gather_s` for a receiver and `stall_s` for a piece; a receiver that did not come is not
  waited for again (`broadcast_membership`).
- A broadcast that breaks off costs its members only time: they fetch the missing parts, and the next one forms a new
  group. So receivers join, leave and die without manual work.
- One broadcast at a time; each content once. Sending happens in a thread: neither the trainer's steps nor its server
  wait for it.

torch.distributed's store and groups are neither encrypted nor authenticated: use them in trusted networks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import structlog
from google.protobuf.duration_pb2 import Duration
from prometheus_client import Counter

from penstock.collective.broadcast_backend import BACKENDS, Transport
from penstock.collective.group import BroadcastGroup, Rendezvous
from penstock.collective.place import BroadcastError, GroupPlace
from penstock.errors import NotOfferedError, ServiceUnavailableError, UnknownVersionError
from penstock.process.tasks import end
from penstock.transfer.chunks import chunk_bytes_for
from penstock.v1 import weights_pb2
from services.trainer.publishing.broadcast_membership import BroadcastMembership

MAX_MEMBERS = 1000
MAX_CONTENTS_REMEMBERED = 256
MAX_GATHERINGS = 16
MIN_PIECE_BYTES = 8 * 1024**2
"""Minimum size of a piece; larger chunks are sent as one piece each, so that pieces end where chunks do."""
_WORD_POLL_S = 0.005

BROADCASTS = Counter("penstock_trainer_broadcasts", "Broadcasts of weights, by outcome.", ["outcome"])
BROADCAST_BYTES = Counter("penstock_trainer_broadcast_bytes", "Bytes of weights broadcast, each once per broadcast.")
GROUPS_FORMED = Counter("penstock_trainer_broadcast_groups", "Groups formed for broadcasts.")

FindContent = Callable[[str, str], Path | None]
"""Maps run and content id to the content's file; None if it is not offered."""
_Name: TypeAlias = tuple[str, str]
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastSettings:
    """How to broadcast."""

    backend: Transport
    """GLOO or NCCL."""
    public_host: str
    """Name or address of this machine for the members; gloo's connections begin and end there."""
    gather_s: float = 2.0
    """Maximum wait for expected receivers."""
    stall_s: float = 10.0
    """Maximum time for forming a group, or for one piece."""


@dataclass(slots=True, kw_only=True)
class _Gathering:
    """Receivers waiting for the broadcast of one content."""

    path: Path
    places: dict[str, asyncio.Future[weights_pb2.JoinBroadcastResponse]] = field(default_factory=dict)
    open_groups: dict[str, str] = field(default_factory=dict)

    def waiting(self) -> list[str]:
        """The receivers that still wait, in rank order."""
        return sorted(receiver_id for receiver_id, place in self.places.items() if not place.done())


class Broadcasts:
    """The broadcasts of one weight store; `close` them.

    Args:
        settings: How.
        listener: Where members find each other; closed with the broadcasts.
        find_content: Finds the content to broadcast.
    """

    def __init__(self, settings: BroadcastSettings, *, listener: socket.socket, find_content: FindContent) -> None:
        self._settings = settings
        self._listener = listener
        self._find_content = find_content
        self._attendance = BroadcastMembership()
        self._gatherings: dict[_Name, _Gathering] = {}
        self._begun: OrderedDict[_Name, None] = OrderedDict()
        self._changed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._rendezvous: Rendezvous | None = None
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []
        self._sequence = 0

    @contextlib.contextmanager
    def attended_by(self, receiver_id: str) -> Iterator[None]:
        """Within the context, a receiver watches the versions and will ask to join."""
        self._attendance.arrive(receiver_id)
        try:
            yield
        finally:
            self._attendance.leave(receiver_id)
            self._note_change()

    async def join(self, request: weights_pb2.JoinBroadcastRequest) -> weights_pb2.JoinBroadcastResponse:
        """A place in the broadcast of a content, once it begins.

        Raises:
            NotOfferedError: Another library, a receiver that is left out for now, or content that was broadcast
            already. UnknownVersionError: The content is not offered.
            ServiceUnavailableError: The broadcast did not come about.
        """
        receiver_id, content = request.receiver_id, (request.run_id, request.content_id)
        self._attendance.note_asked(receiver_id)
        if request.backend != BACKENDS[self._settings.backend]:
            raise NotOfferedError(f"broadcasts go over {self._settings.backend} here; set weights_transport to that")
        if self._attendance.is_left_out(receiver_id, now_s=time.monotonic()):
            raise NotOfferedError("a broadcast broke off at this receiver; it is left out for a while")
        if content in self._begun:
            raise NotOfferedError("the content was broadcast already; fetch it")
        gathering = self._gathering(content)
        if len(gathering.places) >= MAX_MEMBERS:
            raise NotOfferedError(f"a broadcast has at most {MAX_MEMBERS} members; fetch the content")
        place: asyncio.Future[weights_pb2.JoinBroadcastResponse] = asyncio.get_running_loop().create_future()
        gathering.places[receiver_id] = place
        gathering.open_groups[receiver_id] = request.open_group_id
        self._note_change()
        return await place

    async def close(self) -> None:
        """Abort the current broadcast."""
        self._is_closed = True
        self._listener.close()
        self._leave_group()
        await end(*self._tasks)

    def _gathering(self, content: _Name) -> _Gathering:
        gathering = self._gatherings.get(content)
        if gathering is not None:
            return gathering
        path = self._find_content(*content)
        if path is None:
            raise UnknownVersionError(f"content {content[1]:.64} is not offered (any more)")
        if self._is_closed or len(self._gatherings) >= MAX_GATHERINGS:
            raise ServiceUnavailableError("no broadcast now; fetch the content")
        gathering = self._gatherings[content] = _Gathering(path=path)
        task = asyncio.create_task(self._run(content, gathering))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return gathering

    async def _run(self, content: _Name, gathering: _Gathering) -> None:
        error: Exception = ServiceUnavailableError("the trainer stops")
        try:
            await self._wait_for_expected(gathering)
            async with self._one_at_a_time:
                # Receivers that asked during another broadcast are part of this one as well.
                del self._gatherings[content]
                self._begun[content] = None
                while len(self._begun) > MAX_CONTENTS_REMEMBERED:
                    self._begun.popitem(last=False)
                if members := gathering.waiting():
                    await self._broadcast(gathering, members)
        except (BroadcastError, OSError) as failure:
            error = ServiceUnavailableError(f"the broadcast did not come about: {failure}")
            _log.warning("no broadcast", error=str(failure))
        finally:
            self._gatherings.pop(content, None)
            for place in gathering.places.values():
                if not place.done():
                    place.set_exception(error)

    async def _wait_for_expected(self, gathering: _Gathering) -> None:
        """Wait until all expected receivers want this content, or for `gather_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.gather_s):
                while self._missing(gathering):
                    changed = self._changed
                    await changed.wait()
        self._attendance.note_absent(self._missing(gathering))

    def _missing(self, gathering: _Gathering) -> set[str]:
        elsewhere = {name for other in self._gatherings.values() if other is not gathering for name in other.waiting()}
        return self._attendance.expected(now_s=time.monotonic()) - elsewhere - set(gathering.waiting())

    async def _broadcast(self, gathering: _Gathering, members: list[str]) -> None:
        if self._rendezvous is None:
            settings = self._settings
            self._rendezvous = await asyncio.to_thread(
                Rendezvous.serve, self._listener, public_host=settings.public_host, stall_s=settings.stall_s
            )
        place = self._place(gathering, members)
        prefix = f"{place.group_id}/end/{self._sequence}/"
        stall_timeout = Duration()
        stall_timeout.FromMilliseconds(round(place.stall_s * 1000))
        for rank, receiver_id in enumerate(members, start=1):
            gathering.places[receiver_id].set_result(
                weights_pb2.JoinBroadcastResponse(
                    group_id=place.group_id,
                    sequence=self._sequence,
                    rank=rank,
                    num_ranks=place.num_ranks,
                    store_address=self._rendezvous.address,
                    piece_bytes=place.piece_bytes,
                    stall_timeout=stall_timeout,
                )
            )
        start_s = time.monotonic()
        failure = await asyncio.to_thread(self._send, self._rendezvous, place, gathering.path)
        keys = {receiver_id: f"{prefix}{rank}" for rank, receiver_id in enumerate(members, start=1)}
        words = await asyncio.to_thread(_collect_words, self._rendezvous, keys, place.stall_s)
        left_out = self._attendance.note_end(words, is_sent=failure is None, now_s=time.monotonic())
        self._note_change()
        BROADCASTS.labels("failed" if left_out else "ok").inc()
        if left_out:
            self._leave_group()
            _log.warning("broadcast broke off", members=members, left_out=left_out, words=words, error=failure)
        else:
            _log.info("weights broadcast", num_receivers=len(members), seconds=round(time.monotonic() - start_s, 3))

    def _place(self, gathering: _Gathering, members: list[str]) -> GroupPlace:
        """The group for these members: the open one if it has exactly these, each at its rank."""
        group, piece_bytes = self._group, max(MIN_PIECE_BYTES, chunk_bytes_for(gathering.path.stat().st_size))
        is_long_enough = group is not None and group.place.piece_bytes >= piece_bytes
        if group is not None and group.is_usable and is_long_enough and members == self._members:
            open_groups = {gathering.open_groups[receiver_id] for receiver_id in members}
            if open_groups == {group.place.group_id}:
                self._sequence += 1
                return group.place
        self._leave_group()
        self._members, self._sequence = members, 0
        return GroupPlace(
            group_id=uuid.uuid4().hex,
            rank=0,
            num_ranks=len(members) + 1,
            backend=self._settings.backend,
            stall_s=self._settings.stall_s,
            piece_bytes=piece_bytes,
        )

    def _send(self, rendezvous: Rendezvous, place: GroupPlace, path: Path) -> str | None:
        """Form the group if necessary and send, in a thread; returns what went wrong."""
        try:
            with path.open("rb", buffering=0) as content:
                if self._group is None:
                    self._group = rendezvous.form(place, bind_host=rendezvous.host)
                    GROUPS_FORMED.inc()
                size_bytes = os.fstat(content.fileno()).st_size
                self._group.send(content, size_bytes)
                BROADCAST_BYTES.inc(size_bytes)
        except (BroadcastError, OSError) as error:
            return str(error)
        return None

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _collect_words(rendezvous: Rendezvous, keys: dict[str, str], timeout_s: float) -> dict[str, str | None]:
    """Each member's result; None for one that reported nothing in time. Blocks."""
    words: dict[str, str | None] = dict.fromkeys(keys)
    deadline_s = time.monotonic() + timeout_s
    while True:
        for receiver_id, key in keys.items():
            if words[receiver_id] is None and (word := rendezvous.get(key)) is not None:
                words[receiver_id] = word
                rendezvous.delete(key)
        if all(word is not None for word in words.values()) or time.monotonic() > deadline_s:
            return words
        time.sleep(_WORD_POLL_S)
