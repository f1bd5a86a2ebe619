"""Detects an engine that owes something and makes no progress: a hung kernel or a stopped process raises no error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.generator.decoding.activity import Decoding
from services.generator.engine.engine import Engine, EngineHungError

WATCHES_PER_SILENCE = 8
"""So a hung engine is detected at most an eighth later than stated."""


class DecodeWatch:
    """How long an engine has been awaited without progress: a token sampled, a tensor installed.

    Pure: its inputs are observations and a monotonic clock.
    """

    def __init__(self) -> None:
        self._signs: object = None
        self._since_s: float | None = None

    def silent_s(self, *, is_awaited: bool, signs: object, now_s: float) -> float:
        """Seconds since the last progress.

        Args:
            is_awaited: Whether tokens or an installation are awaited; false if the engine is paused on purpose.
            signs: Differs from before if the engine made progress.
            now_s: Now.
        """
        if not is_awaited:
            self._since_s = None
            return 0.0
        if self._since_s is None or signs != self._signs:
            self._signs, self._since_s = signs, now_s
        return now_s - self._since_s


async def watch_engine(
    engine: Engine,
    decoding: Decoding,
    *,
    max_silence_s: float,
    owes_tokens: Callable[[], bool],
    on_hung: Callable[[EngineHungError], None],
) -> None:
    """Report an engine that owes tokens, or an installation, and makes no progress; until cancelled.

    Args:
        engine: Started.
        decoding: The samples that wait for it.
        max_silence_s: Longest time without progress.
        owes_tokens: Whether it is to sample at all: false while it is paused, or holds no trusted weights.
        on_hung: Called each time it is found silent for longer.
    """
    watch = DecodeWatch()
    while True:
        await asyncio.sleep(max_silence_s / WATCHES_PER_SILENCE)
        stats = engine.stats()
        is_installing = stats.install_signs is not None
        silent_s = watch.silent_s(
            is_awaited=is_installing or (decoding.num_awaited > 0 and owes_tokens()),
            signs=(stats.tokens_sampled, stats.install_signs),
            now_s=time.monotonic(),
        )
        if silent_s >= max_silence_s:
            owed = f"no token for {silent_s:.1f} s while {decoding.num_awaited} samples were waited for"
            what = f"weights were installed for {silent_s:.1f} s without getting on" if is_installing else owed
            on_hung(EngineHungError(f"{what}; engine.max_silence_s is {max_silence_s}"))
