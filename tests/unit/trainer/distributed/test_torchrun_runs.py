"""Where processes that torchrun starts, and starts again, meet: its store outlives them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from services.trainer.distributed import torchrun_runs
from services.trainer.distributed.torchrun_runs import TorchrunRuns

SOON_S = 30.0
ADDRESS = "address of rank 0"


class LostError(Exception):
    pass


def lost(reason: str) -> None:
    raise LostError(reason)


@contextmanager
def store_of_torchrun(monkeypatch: pytest.MonkeyPatch, *, num_ranks: int) -> Iterator[None]:
    """The one of an agent, in this process' variables."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield


class Other:
    """A process other than the coordinator, whose variables say its rank while it joins."""

    def __init__(self, rank: int, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = TorchrunRuns()
        self._pool = pool
        monkeypatch.setenv("RANK", str(rank))
        joining = self.waits()
        # Until it has read its rank, by a connection of its own: that of one that waits is taken.
        looking = TorchrunRuns()._joined()
        deadline = time.monotonic() + SOON_S
        while torchrun_runs._present(looking, rank) != self.runs._name:
            assert time.monotonic() < deadline
        self.next = joining

    def waits(self) -> Future[dist.Store | None]:
        return self._pool.submit(self.runs.wait)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def met(coordinator: TorchrunRuns, others: list[Other], pool: ThreadPoolExecutor) -> list[dist.Store]:
    """The stores in which all of them meet for a run."""
    begun = pool.submit(coordinator.begin)
    stores = [begun.result(SOON_S), *(other.next.result(SOON_S) for other in others)]
    found = [store for store in stores if store is not None]
    assert len(found) == len(stores)
    return found


def test_processes_that_are_started_again_never_read_what_those_before_them_wrote(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    with store_of_torchrun(monkeypatch, num_ranks=3):
        before = [Other(rank, pool, monkeypatch) for rank in (1, 2)]
        first = met(TorchrunRuns(on_lost=lost), before, pool)
        first[0].set("address", ADDRESS)
        assert {store.get("address").decode() for store in first} == {ADDRESS}

        # All are killed; no process counts how often, and a run begins in the same store.
        after = [Other(rank, pool, monkeypatch) for rank in (1, 2)]
        assert not any(other.next.done() for other in after), "it takes the dead coordinator's run for its own"
        second = met(TorchrunRuns(on_lost=lost), after, pool)
        assert not any(store.check(["address"]) for store in second)
        second[0].set("address", "another")
        assert {store.get("address").decode() for store in second} == {"another"}


def test_a_coordinator_waits_for_the_successor_of_a_process_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    with store_of_torchrun(monkeypatch, num_ranks=2):
        gone = Other(1, pool, monkeypatch)
        met(TorchrunRuns(on_lost=lost), [gone], pool)
        begun = pool.submit(TorchrunRuns(on_lost=lost).begin)
        # The one that is gone is called, and never answers.
        TorchrunRuns()._joined().wait([f"penstock/call/{gone.runs._name}/2"], timedelta(seconds=SOON_S))
        assert not begun.done()
        successor = Other(1, pool, monkeypatch)
        begun.result(SOON_S).set("address", ADDRESS)
        store = successor.next.result(SOON_S)
        assert store is not None
        assert store.get("address").decode() == ADDRESS


def test_several_runs_of_the_same_processes_and_their_end(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    with store_of_torchrun(monkeypatch, num_ranks=2):
        coordinator, other = TorchrunRuns(on_lost=lost), Other(1, pool, monkeypatch)
        for _ in range(2):
            own, its = met(coordinator, [other], pool)
            assert not own.check(["address"])
            own.set("address", ADDRESS)
            assert its.get("address").decode() == ADDRESS
            assert other.runs.is_under_way
            other.next = other.waits()
        coordinator.end()
        assert other.next.result(SOON_S) is None
        assert not other.runs.is_under_way


def test_a_process_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of_torchrun(monkeypatch, num_ranks=3), pytest.raises(LostError, match="processes 1, 2 did not come"):
        TorchrunRuns(meet_s=0.2, on_lost=lost).begin()


def test_a_coordinator_ends_quietly_after_the_launcher_that_kept_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = "s = __import__('torch').distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    code = f"{serving}; print(s.port, flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as launcher:
        assert launcher.stdout is not None
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launcher.stdout.readline().strip(), "WORLD_SIZE": "2"}
        for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        runs = TorchrunRuns(on_lost=lost)
        runs._joined()
        launcher.kill()
        launcher.wait()
        runs.end()
