"""A process group in which rank 0 sends the same bytes to all others, over NCCL or gloo.

Promises:

- Nothing here waits longer than `stall_s` for a member: a slower or missing member ends the group with BroadcastError
  for every member.
- `abort`, from any thread, ends the operation under way within milliseconds for the caller, even if the library hangs.
- A group is made directly on a store, not on the process's default group: a process can be in several, and vLLM's or
  FSDP's groups in the same process are not touched.

torch is imported when the first group forms: processes without torch import this package too.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from io import RawIOBase
from typing import Any

from penstock.collective.broadcast_backend import Transport
from penstock.collective.forming import make_group
from penstock.collective.place import BroadcastError, GroupPlace

_MAX_WORD_BYTES = 64
_POLL_FIRST_S = 0.0002
_POLL_MOST_S = 0.002


class Rendezvous:
    """The store in which members find each other: a torch.distributed TCPStore, served by rank 0."""

    def __init__(self, store: Any, *, host: str, port: int) -> None:
        self.host = host
        """Where the other members reach rank 0."""
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """host:port of the store."""
        self._store = store

    @classmethod
    def serve(cls, listener: socket.socket, *, public_host: str, stall_s: float) -> Rendezvous:
        """Serve it on a listening socket, of which it takes ownership. Raises BroadcastError."""
        from torch.distributed import TCPStore

        port = listener.getsockname()[1]
        try:
            # On its own the library would listen on every address of the machine.
            store = TCPStore(
                public_host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=stall_s),
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, ValueError) as error:
            raise BroadcastError(f"the store of broadcast groups does not start: {_first_line(error)}") from error
        return cls(store, host=public_host, port=port)

    @classmethod
    def connect(cls, address: str, *, stall_s: float) -> Rendezvous:
        """Reach the store of rank 0. Raises BroadcastError."""
        from torch.distributed import TCPStore

        host, port = split_address(address)
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=stall_s))
        except (RuntimeError, ValueError) as error:
            raise BroadcastError(f"no store of a broadcast group at {address}: {_first_line(error)}") from error
        return cls(store, host=host, port=port)

    def form(self, place: GroupPlace, *, bind_host: str) -> BroadcastGroup:
        """Meet the other members; blocks up to twice `stall_s`. Raises BroadcastError: not all came."""
        from torch.distributed import PrefixStore

        try:
            group = make_group(PrefixStore(place.group_id, self._store), place, bind_host=bind_host)
        except (RuntimeError, ValueError) as error:
            raise BroadcastError(f"group {place.group_id} did not form: {_first_line(error)}") from error
        return BroadcastGroup(group, place)

    def set(self, key: str, value: str) -> None:
        """Store a value for the other members. Raises BroadcastError."""
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise BroadcastError(f"the store of the group is gone: {_first_line(error)}") from error

    def get(self, key: str) -> str | None:
        """A stored value; None if there is none yet."""
        try:
            if not self._store.check([key]):
                return None
            value: bytes = self._store.get(key)
        except RuntimeError:
            return None
        return value[:_MAX_WORD_BYTES].decode(errors="replace")

    def delete(self, key: str) -> None:
        """Delete a stored value."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(key)


class BroadcastGroup:
    """A formed group; made by `Rendezvous.form`. One broadcast at a time."""

    def __init__(self, group: Any, place: GroupPlace) -> None:
        self.place = place
        self._group = group
        self._aborted = threading.Event()
        self._works: list[Any] = []
        self._buffers = [_Buffer(place) for _ in range(2)]

    def send(self, content: RawIOBase, size_bytes: int) -> None:
        """Broadcast `size_bytes` of a file to all others, as rank 0; blocks. Raises BroadcastError, OSError."""
        with self._ending_on_error():
            under_way = None
            for index, num_bytes in enumerate(self._pieces(size_bytes)):
                # The next piece is read from the disk while this one travels.
                buffer = self._buffers[index % 2]
                if content.readinto(buffer.host(num_bytes)) != num_bytes:
                    raise BroadcastError("the content is shorter than its manifest states")
                buffer.upload(num_bytes)
                if under_way is not None:
                    self._finish(under_way)
                under_way = self._start(buffer, num_bytes)
            if under_way is not None:
                self._finish(under_way)

    def receive(self, size_bytes: int) -> Iterator[memoryview]:
        """The pieces of a content in order, as another rank than 0; each blocks. Raises BroadcastError.

        A piece's memory is used again from the next but one on; while it is looked at, the next one travels.
        """
        sizes = list(self._pieces(size_bytes))
        with self._ending_on_error():
            under_way = self._start(self._buffers[0], sizes[0])
            for index, num_bytes in enumerate(sizes):
                self._finish(under_way)
                if index + 1 < len(sizes):
                    under_way = self._start(self._buffers[(index + 1) % 2], sizes[index + 1])
                buffer = self._buffers[index % 2]
                buffer.download(num_bytes)
                yield buffer.host(num_bytes)

    def abort(self) -> None:
        """End the operation under way, and the group; idempotent. Other members notice at once or after `stall_s`."""
        if self._aborted.is_set():
            return
        self._aborted.set()
        group, works, self._group, self._works = self._group, self._works, None, []
        # Releasing a group waits for its last operation, which in gloo ends by its time-out at the earliest.
        threading.Thread(target=_let_go, args=(group, works), name="ending broadcast group", daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """Whether it can carry another broadcast."""
        return not self._aborted.is_set()

    def _pieces(self, size_bytes: int) -> Iterator[int]:
        for begin in range(0, size_bytes, self.place.piece_bytes):
            yield min(self.place.piece_bytes, size_bytes - begin)

    def _start(self, buffer: _Buffer, num_bytes: int) -> Any:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group = self._group
        if group is None:
            raise BroadcastError("the broadcast was aborted")
        with buffer.on_device():
            work = group.broadcast([buffer.travelling(num_bytes)], options)
        self._works = [work]
        return work

    def _finish(self, work: Any) -> None:
        deadline_s = time.monotonic() + self.place.stall_s
        pause_s = _POLL_FIRST_S
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise BroadcastError(f"no piece came through for {self.place.stall_s:g} s")
            if self._aborted.wait(pause_s):
                raise BroadcastError("the broadcast was aborted")
            pause_s = min(_POLL_MOST_S, pause_s * 2)
        work.wait()

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """A group in which something failed is out of step and cannot be used again."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.abort()
            raise BroadcastError(f"the broadcast broke off: {_first_line(error)}") from error
        except BaseException:
            self.abort()
            raise


class _Buffer:
    """Memory of one piece: what the file is read into or written from, and for NCCL what travels, on the GPU."""

    def __init__(self, place: GroupPlace) -> None:
        import torch

        self._device = torch.device("cuda") if place.backend is Transport.NCCL else None
        is_pinned = self._device is not None
        self._host = torch.empty(place.piece_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._view = memoryview(self._host.numpy())
        self._travelling = self._host if self._device is None else torch.empty_like(self._host, device=self._device)

    def host(self, num_bytes: int) -> memoryview:
        """The piece in the processor's memory."""
        return self._view[:num_bytes]

    def travelling(self, num_bytes: int) -> Any:
        """The piece as the library takes it: uint8, one axis."""
        return self._travelling[:num_bytes]

    def upload(self, num_bytes: int) -> None:
        """Bring what is in the processor's memory to where it travels from."""
        if self._device is not None:
            self._travelling[:num_bytes].copy_(self._host[:num_bytes])

    def download(self, num_bytes: int) -> None:
        """Bring what came to the processor's memory."""
        if self._device is not None:
            self._host[:num_bytes].copy_(self._travelling[:num_bytes])

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the library uses this buffer's device."""
        import torch

        return contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)


def _let_go(group: Any, works: list[Any]) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
    del group
    works.clear()


def load_library() -> None:
    """Import torch now, which takes seconds, rather than while others wait for this member. Blocks."""
    importlib.import_module("torch.distributed")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port. Raises BroadcastError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BroadcastError(f"{address!r:.100} is not host:port")
    return host.strip("[]"), int(port)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
