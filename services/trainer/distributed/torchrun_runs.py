"""Where the processes of a trainer that torchrun started meet for each of its runs.

torchrun keeps one store for as long as it lives: processes that it starts again find there what their predecessors
wrote, their addresses among it. Nor do its machines count restarts alike. So every process gives itself a name, and
every run has one of its own, which the coordinator tells the processes that are there now:

    another process   process/RANK = NAME, then waits for call/NAME/1, call/NAME/2 and so on
    the coordinator   call/NAME/N = RUN, for the NAME that it finds at each rank; or ends them instead
    another process   here/RUN/NAME, and meets the others below RUN
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from services.trainer.distributed.launch import end_process

if TYPE_CHECKING:
    from torch.distributed import Store

WAIT_TIMEOUT = timedelta(hours=1)
"""Duration of one wait for the next run, which is then repeated; the death of torchrun ends it at once."""
MEET_S = 600.0
"""How long the coordinator waits for the others: as long as torchrun may take to start them again, and some more."""
_LOOK_S, _WARN_S = 0.1, 30.0
_ROOT = "penstock"
_ENDS = "ends"
_log = structlog.get_logger()


class TorchrunRuns:
    """The runs of a trainer under torchrun, in one of its processes.

    Args:
        meet_s: How long the coordinator waits for the others, in seconds.
        on_lost: Called by the coordinator with the reason if one of them does not come.
    """

    def __init__(self, *, meet_s: float = MEET_S, on_lost: Callable[[str], None] = end_process) -> None:
        self.is_under_way = False
        """In the others: whether one has begun and not ended."""
        self._meet_s = meet_s
        self._on_lost = on_lost
        self._name = uuid.uuid4().hex
        self._num_calls = 0
        self._store: Store | None = None

    def begin(self) -> Store:
        """In the coordinator: where the processes meet for a new run; returns once all of them know."""
        import torch.distributed as dist

        store = self._joined()
        run = f"{_ROOT}/run/{uuid.uuid4().hex}"
        self._gather(store, run)
        return dist.PrefixStore(run, store)

    def wait(self) -> Store | None:
        """In the others: where they meet for the next run, once it begins; None if the coordinator ends instead."""
        import torch.distributed as dist

        store = self._joined()
        if self._num_calls == 0:
            store.set(_process(int(os.environ["RANK"])), self._name)
        self._num_calls += 1
        call = _call(self._name, self._num_calls)
        while True:
            with contextlib.suppress(dist.DistStoreError):
                store.wait([call], WAIT_TIMEOUT)
                break
        run = store.get(call).decode()
        self.is_under_way = run != _ENDS
        if not self.is_under_way:
            return None
        store.set(_here(run, self._name), "")
        return dist.PrefixStore(run, store)

    def end(self) -> None:
        """In the coordinator: end the others; no more runs follow."""
        import torch.distributed as dist

        try:
            store = self._joined()
            for rank in _others():
                if (name := _present(store, rank)) is not None:
                    _tell(store, name, _ENDS)
        except dist.DistError as error:
            # The launcher that kept it has ended, as all of them do where the whole job is stopped.
            _log.info(
                "the store of torchrun is gone; its other processes are not told", error=str(error).split("\n")[0]
            )

    def _gather(self, store: Store, run: str) -> None:
        """Tells every other process of a run; one that has ended since it wrote its name is followed by another."""
        missing, told = set(_others()), set()
        begun = warned = time.monotonic()
        while missing:
            for rank in sorted(missing):
                if (name := _present(store, rank)) is None:
                    continue
                if name not in told:
                    told.add(name)
                    _tell(store, name, run)
                if store.check([_here(run, name)]):
                    missing.remove(rank)
            if not missing:
                return
            now = time.monotonic()
            names = ", ".join(map(str, sorted(missing)))
            if now > begun + self._meet_s:
                self._on_lost(f"its processes {names} did not come within {self._meet_s:.0f} s; their logs say why")
                return
            if now > warned + _WARN_S:
                warned = now
                _log.warning("the run waits for processes of its trainer", ranks=names, waited_s=round(now - begun))
            time.sleep(_LOOK_S)

    def _joined(self) -> Store:
        import torch.distributed as dist

        if self._store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            is_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0"
            self._store = dist.TCPStore(host, port, is_master=is_server, wait_for_workers=False)
        return self._store


def _others() -> range:
    return range(1, int(os.environ["WORLD_SIZE"]))


def _present(store: Store, rank: int) -> str | None:
    """The name of the process that was started last with that rank."""
    key = _process(rank)
    return store.get(key).decode() if store.check([key]) else None


def _tell(store: Store, name: str, run: str) -> None:
    store.set(_call(name, store.add(f"{_ROOT}/calls/{name}", 1)), run)


def _process(rank: int) -> str:
    return f"{_ROOT}/process/{rank}"


def _call(name: str, number: int) -> str:
    return f"{_ROOT}/call/{name}/{number}"


def _here(run: str, name: str) -> str:
    return f"{run}/here/{name}"
