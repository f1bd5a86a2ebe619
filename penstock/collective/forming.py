"""Forms a gloo or NCCL process group within a deadline, even if the library hangs.

gloo connects when a group is made, and gives up by itself. NCCL connects in a group's first operation, in a call that
blocks without a deadline while a member is missing. So members of an NCCL group meet in the store
first, and the first operation is made here, in a thread that is left behind when the deadline passes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from penstock.collective.broadcast_backend import Transport
from penstock.collective.place import BroadcastError, GroupPlace

NCCL_TIMEOUT_FACTOR = 10
"""NCCL's own watchdog ends the process when an operation exceeds its time-out: ours must be long over by then."""
_Result = TypeVar("_Result")


def make_group(store: Any, place: GroupPlace, *, bind_host: str) -> Any:
    """Form the group of a place; blocks for up to twice `stall_s`.

    Raises:
        BroadcastError: The deadline passed.
        RuntimeError, ValueError: The library refuses.
    """
    if place.backend is Transport.NCCL:
        meet(store, place)
        return _make_nccl(store, place)
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=bind_host)]
    options._timeout = timedelta(seconds=place.stall_s)
    return ProcessGroupGloo(store, place.rank, place.num_ranks, options)


def meet(store: Any, place: GroupPlace) -> None:
    """Wait in the group's store until all members are there. Raises BroadcastError: not within `stall_s`."""
    store.set(f"here/{place.rank}", "")
    try:
        store.wait([f"here/{rank}" for rank in range(place.num_ranks)], timedelta(seconds=place.stall_s))
    except RuntimeError as error:
        raise BroadcastError(f"not all {place.num_ranks} members came within {place.stall_s:g} s") from error


def within(timeout_s: float, work: Callable[[], _Result], *, what: str, on_late: Callable[[], None]) -> _Result:
    """Return what `work` returns or raises; after `timeout_s` abandon it in its thread.

    Args:
        timeout_s: The deadline.
        work: Blocks, perhaps for ever.
        what: Names it in the error.
        on_late: Called if it ends after the deadline, successfully or not.

    Raises:
        BroadcastError: The deadline passed.
    """
    ended: Future[_Result] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    if not wait([ended], timeout_s).done:
        ended.add_done_callback(lambda _: on_late())
        raise BroadcastError(f"{what} took more than {timeout_s:g} s")
    return ended.result()


def _make_nccl(store: Any, place: GroupPlace) -> Any:
    import torch
    from torch.distributed import BroadcastOptions, ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=place.stall_s * NCCL_TIMEOUT_FACTOR)
    group = ProcessGroupNCCL(store, place.rank, place.num_ranks, options)

    def connect() -> None:
        first = BroadcastOptions()
        first.rootRank, first.rootTensor = 0, 0
        group.broadcast([torch.zeros(1, dtype=torch.uint8, device="cuda")], first).wait()
        torch.cuda.synchronize()

    def abort() -> None:
        with contextlib.suppress(RuntimeError):
            group.abort()

    try:
        within(place.stall_s, connect, what="connecting over NCCL", on_late=abort)
    except BroadcastError:
        # Ends an operation of a communicator that is there; may itself hang in one that is not.
        threading.Thread(target=abort, name="ending broadcast group", daemon=True).start()
        raise
    return group
