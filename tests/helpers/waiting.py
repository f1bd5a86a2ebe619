"""Waits for a condition, never for a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Return once `condition()` holds; TimeoutError after `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 -- the condition is no event
            await asyncio.sleep(0.005)
