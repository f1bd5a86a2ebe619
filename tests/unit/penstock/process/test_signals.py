"""One request to stop, however many signals; only a later one forces."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.process.signals import FORCE_AFTER_S, StopSignals
from tests.helpers.waiting import until


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of before come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT, signal.SIGTERM)])
async def test_signals_that_come_together_are_one_request(numbers: tuple[signal.Signals, ...]) -> None:
    now_s, forced = [100.0], list[bool]()
    with StopSignals(force=lambda: forced.append(True), now_s=lambda: now_s[0]) as signals:
        os.kill(os.getpid(), numbers[0])
        await until(signals.requested.is_set)
        for number in numbers[1:]:
            now_s[0] += 0.4 * FORCE_AFTER_S
            os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        assert forced == []
        now_s[0] = 100.0 + FORCE_AFTER_S
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: forced == [True])


async def test_a_signal_that_another_thread_receives_wakes_an_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select, is_idle = selector.select, threading.Event()

    def watched_select(timeout: float | None = None) -> Any:
        if timeout is None:
            is_idle.set()
        return select(timeout)

    def receive() -> None:
        is_idle.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=receive)
    with StopSignals() as signals:
        monkeypatch.setattr(selector, "select", watched_select)
        thread.start()
        await signals.requested.wait()
    thread.join()


STOPS_AND_IS_SIGNALLED_AGAIN = """
import asyncio, os, signal
from penstock.process.signals import StopSignals

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
        print("signalled while modules are torn down", flush=True)

async def stopped():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.requested.wait()

late = Late()
asyncio.run(stopped())
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
"""


def test_the_same_request_does_not_kill_a_process_that_already_stops() -> None:
    done = subprocess.run([sys.executable, "-c", STOPS_AND_IS_SIGNALLED_AGAIN], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("signalled")


def test_without_a_request_the_previous_handlers_come_back() -> None:
    async def served() -> None:
        with StopSignals():
            pass

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    asyncio.run(served())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
