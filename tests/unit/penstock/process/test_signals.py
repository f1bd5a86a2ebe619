"""One request to stop, however many signals; only a later one forces."""

from __future__ import annotations

import os
import signal

import pytest

from penstock.process.signals import FORCE_AFTER_S, StopSignals
from tests.helpers.waiting import until


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT, signal.SIGTERM)])
async def test_signals_that_come_together_are_one_request(numbers: tuple[signal.Signals, ...]) -> None:
    now_s, forced = [100.0], list[bool]()
    signals = StopSignals(force=lambda: forced.append(True), now_s=lambda: now_s[0])
    signals.listen()
    try:
        os.kill(os.getpid(), numbers[0])
        await until(signals.requested.is_set)
        for number in numbers[1:]:
            now_s[0] += 0.4 * FORCE_AFTER_S
            signals._take(number)
        assert forced == []
        now_s[0] = 100.0 + FORCE_AFTER_S
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: forced == [True])
    finally:
        signals.ignore()
